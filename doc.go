// Package ratelimit keeps rate limits in the Postgres that an application already has.
//
// A [Limiter] has a name, a policy ([FixedWindow], [SlidingWindow], [TokenBucket] or [SlidingLog]) and a pool:
//
//	limiter, err := ratelimit.New(pool, ratelimit.Config{
//		Name:   "login",
//		Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute},
//	})
//	result, err := limiter.Allow(ctx, "user:123")
//
// Each decision is made inside Postgres, by a function that locks the row of the key, decides by the database's clock, and
// updates the row only if the request is allowed. It is exact under any concurrency, over any number of
// processes and whatever their clocks say, takes one round trip, and a denial takes nothing. Calls that come while others
// are under way leave together, as one statement.
//
// [AllowAll] takes from several limiters or from none of them, and a policy that is [All] of several does so for one key.
// [Limiter.Wait] blocks until a request is allowed, and [Limiter.With] asks for the same keys with other numbers.
// When Postgres is away, a call returns an error, or what [Config].OnFailure says: [FailOpen], [FailClosed] or [FallbackLocal].
//
// The database has to be migrated first, see the package migrations; a command that shows all of this at work is
// cmd/pgratelimit.
package ratelimit
