// Package ratelimit keeps rate limits in the Postgres that an application already has.
//
//	limiter, err := ratelimit.New(pool, ratelimit.Config{
//		Name:   "login",
//		Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute},
//	})
//	result, err := limiter.Allow(ctx, "user:123")
//
// Postgres decides, in one round trip. A function locks the key's row, reads the database's clock, and updates the row
// only if it allows the request. So limits are exact under any concurrency and over any number of processes, whatever
// their clocks say, and a denial takes nothing. Calls that arrive while others are under way share a statement.
//
// Migrate the database first; see package migrations. The command cmd/pgratelimit shows all of this at work.
//
// # Asking
//
// [Limiter.Allow] and [Limiter.AllowN] take, [Limiter.Peek] looks, and [Limiter.Wait] and [Limiter.WaitN] block until
// there is room. [Limiter.With] asks for the same keys with other numbers. Policies are [FixedWindow], [SlidingWindow],
// [TokenBucket], [SlidingLog] and [CalendarWindow]. Several limiters share one [Client], from [NewClient].
//
// # Several limits
//
// [AllowAll] takes from several limiters or from none of them, what each [Limiter.Request] says. A policy that is [All]
// of several does so for one key.
//
// # Limits without a deploy
//
// [Policies] are rows of a table, in which people change limits, ban keys and try policies out. [Limiter.Explain] tells
// which one is in force for a key. [Ban] bans keys that are denied again and again.
//
// # Transactions
//
// [Limiter.WithTx] asks in the caller's transaction: limiter.WithTx(tx).Allow(ctx, key). A rollback undoes what it
// took, gave back or granted.
//
// # Giving back
//
// [Limiter.Refund] and [Limiter.RefundN] give back what a request took, and with its [Result.Receipt] another process
// can. [Limiter.Grant] gives credit above the limit. [Limiter.Reset] makes a key as good as new.
//
// # Busy keys
//
// With a [Lease], a process takes some of a busy key's limit ahead, and decides most calls by itself.
//
// # Outages
//
// [Config].OnFailure says what a call answers while Postgres is away or slow: [ReturnError], [FailOpen], [FailClosed]
// or [FallbackLocal]. [Result].Source tells how a decision came about. [ClientConfig].Logger, which defaults to that
// of the process, tells when an outage begins and ends, and of what only a person can mend. So does [Observer] of
// outages. [OwnPool] keeps decisions independent of the application's pool.
//
// # Errors
//
// A denial is a [Result], and no error. Compare errors by [errors.Is] with the variables below. [ErrorKind] names an
// error in a word.
//
// # Testing
//
// [TestConfig] replaces the clocks. Package ratelimittest has a database in memory, for tests without Postgres. A
// limiter that [New] makes with a pgx.Tx decides in it, so a test can roll back.
package ratelimit
