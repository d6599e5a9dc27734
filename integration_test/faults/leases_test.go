package faults

import (
	"context"
	"encoding/gob"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// leaseFleet is a group of processes with leases, and their reports.
type leaseFleet struct {
	leaseWork

	t        *testing.T
	mu       sync.Mutex // guards the fields below
	uses     []leaseUse
	ends     map[int]leaseUse // by process: the last report, of processes that were not killed
	counts   map[int]int64    // by process: the number of statements that it sent
	children int
}

// leaseChild is one process of the fleet.
type leaseChild struct {
	*exec.Cmd

	number int
	stdin  io.WriteCloser
	stderr strings.Builder
	heard  chan struct{} // closed when all reports of the process were read
}

func newLeaseFleet(t *testing.T, w leaseWork) *leaseFleet {
	t.Helper()
	return &leaseFleet{leaseWork: w, t: t, ends: map[int]leaseUse{}, counts: map[int]int64{}}
}

// start starts a process that reaches the database at url.
func (f *leaseFleet) start(url string, seed uint64) (*leaseChild, error) {
	f.mu.Lock()
	c := &leaseChild{number: f.children, heard: make(chan struct{})}
	f.children++
	f.mu.Unlock()
	w := f.leaseWork
	w.URL, w.Seed = url, seed
	text, err := json.Marshal(w)
	if err != nil {
		return nil, err
	}
	c.Cmd = exec.CommandContext(f.t.Context(), os.Args[0])
	c.Env = append(os.Environ(), leaseWorkVariable+"="+string(text))
	c.Stderr = &c.stderr
	if c.stdin, err = c.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(c.heard)
		f.hear(c.number, stdout)
	}()
	return c, nil
}

// hear reads a process's reports until the process ends. An incomplete report does not count.
func (f *leaseFleet) hear(process int, stdout io.Reader) {
	messages := gob.NewDecoder(stdout)
	places := map[int64]int{} // the index in uses, by ID
	for {
		u := leaseUse{process: process}
		if messages.Decode(&u) != nil {
			return
		}
		f.mu.Lock()
		f.counts[process] = u.Statements
		switch {
		case u.Ended:
			f.ends[process] = u
		case u.BackOf != 0:
			f.uses[places[u.BackOf]].back = true
		default:
			places[u.ID] = len(f.uses)
			f.uses = append(f.uses, u)
		}
		f.mu.Unlock()
	}
}

// kill kills a process at once.
func (c *leaseChild) kill() error {
	err := c.Process.Kill()
	<-c.heard
	_ = c.Wait() // the process was killed
	return err
}

// end makes a process return its leases, and waits until the process ends.
func (c *leaseChild) end() error {
	if err := c.stdin.Close(); err != nil {
		return err
	}
	<-c.heard
	return c.Wait()
}

// freeze stops a process for a time, and then lets it go on.
func (c *leaseChild) freeze(ctx context.Context, d time.Duration) error {
	if err := c.Process.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	pause(ctx, d)
	return c.Process.Signal(syscall.SIGCONT)
}

// misfortune is a fault that happens to a process.
type misfortune string

const (
	frozenBriefly misfortune = "frozen for longer than a lease"
	frozenForLong misfortune = "frozen for longer than a window"
	killed        misfortune = "killed"
	cutOff        misfortune = "its connections are cut"
	unheard       misfortune = "an answer is lost"
	slow          misfortune = "answers take longer than a lease lasts"
	away          misfortune = "the database is away for a while"
)

// live runs processes one after another. They reach the database through a proxy. All misfortunes happen to them, in
// random order.
func (f *leaseFleet) live(random *rand.Rand, proxy *wireProxy, misfortunes []misfortune) error {
	ctx := f.t.Context()
	upTo := func(d time.Duration) time.Duration { return time.Duration(random.Int64N(int64(d))) }
	child, err := f.start(proxy.url, random.Uint64())
	if err != nil {
		return err
	}
	random.Shuffle(len(misfortunes), func(a, b int) {
		misfortunes[a], misfortunes[b] = misfortunes[b], misfortunes[a]
	})
	for _, what := range misfortunes {
		pause(ctx, f.Pace/4+upTo(f.Pace))
		switch what {
		case frozenBriefly:
			err = child.freeze(ctx, f.Pace/8+upTo(f.Pace/2))
		case frozenForLong:
			err = child.freeze(ctx, f.Pace+upTo(f.Pace))
		case killed:
			if err = child.kill(); err == nil {
				child, err = f.start(proxy.url, random.Uint64())
			}
		case cutOff:
			proxy.cutAll()
		case unheard:
			proxy.fail(&fault{reply: anyReply, then: swallow})
		case slow:
			for range 6 {
				until := make(chan struct{})
				proxy.fail(&fault{reply: anyReply, then: late, until: until})
				pause(ctx, f.Pace/8+upTo(f.Pace/16))
				close(until)
			}
		case away:
			proxy.refuse(true)
			pause(ctx, f.Pace/8+upTo(f.Pace/2))
			proxy.refuse(false)
		}
		if err != nil {
			return err
		}
	}
	pause(ctx, f.Pace/2)
	if err := child.end(); err != nil {
		f.t.Errorf("a child: %v: %s", err, &child.stderr)
	}
	return nil
}

// sums returns how many units were allowed, how many of them came from leases, and how many statements were sent.
func (f *leaseFleet) sums() (decisions, leased, statements int64) {
	for _, u := range f.uses {
		decisions++
		if u.Leased {
			leased++
		}
	}
	for _, n := range f.counts {
		statements += n
	}
	return decisions, leased, statements
}

// together runs several processes at once. Each process is behind its own proxy, and must end successfully.
func (f *leaseFleet) together(random *rand.Rand, db *pgtest.DB, processes int, misfortunes ...misfortune) {
	f.t.Helper()
	var lives sync.WaitGroup
	errs := make([]error, processes)
	for i := range errs {
		proxy := newWireProxy(f.t, db.URL)
		mine := rand.New(rand.NewPCG(random.Uint64(), 0))
		lives.Go(func() { errs[i] = f.live(mine, proxy, append([]misfortune(nil), misfortunes...)) })
	}
	lives.Wait()
	for _, err := range errs {
		require.NoError(f.t, err)
	}
	require.Len(f.t, f.ends, processes)
}

// leasesAtWork is a workload that uses up each window, while each process holds leases.
func leasesAtWork(window time.Duration) leaseWork {
	return leaseWork{
		Names: []string{"fixed", "sliding", "bucket", "calendar", "all"}, Limit: 600, Window: window, Pace: window,
		Callers: 6, Gap: 2 * time.Millisecond, Timeout: window / 4, Refunds: true,
	}
}

// Processes lease, freeze, die, and lose the database. Together they never allow more than the policies do.
func TestLeasesOfUnluckyProcesses(t *testing.T) {
	t.Parallel()

	random := random(t)
	for range testkit.Rounds(t, "ROUNDS", 1) {
		// A busy machine makes few calls within a span, so the span doubles until a lease is granted.
		for span, leased := 1200*time.Millisecond, int64(0); leased == 0; span *= 2 {
			require.Less(t, span, 20*time.Second, "nothing is leased")
			w := leasesAtWork(span)
			f := newLeaseFleet(t, w)
			f.together(random, withMonths(t, w.Window), 4, frozenBriefly, frozenForLong, killed, cutOff, unheard,
				slow, away)
			require.NoError(t, leaseJudge{leaseWork: w}.judge(f.uses))
			var decisions, statements int64
			decisions, leased, statements = f.sums()
			t.Logf("%d decisions, %d of them leased, %d statements", decisions, leased, statements)
			for _, end := range f.ends {
				f.requireBalance(end)
			}
		}
	}
}

// requireBalance checks a process that has ended: all units taken in advance were spent, returned or lost.
func (f *leaseFleet) requireBalance(end leaseUse) {
	f.t.Helper()
	spent := int64(0)
	for _, u := range f.uses {
		if u.process == end.process && u.Leased {
			spent += u.N
		}
	}
	require.Equal(f.t, end.Lease.Taken, spent+end.Lease.Returned+end.Lease.Stranded)
}

// A bucket can fill up while a process holds a lease of this bucket. Even if callers spend first the lease and then the
// whole bucket, they get no more than the bucket holds.
func TestLeasesOfABucketThatFillsUp(t *testing.T) {
	t.Parallel()

	w := leaseWork{Names: []string{"bucket"}, Limit: 128_000, Window: 128 * time.Second} // a lease lasts for 1 s
	for attempt := 0; ; attempt++ {
		db := pgtest.New(t)
		config := ratelimit.Config{Name: "bucket", Policy: w.policy("bucket")}
		plain := limitertest.New(t, db.Pool, config)
		config.Lease = &ratelimit.Lease{MaxShare: 0.1}
		client := limitertest.NewClient(t, db.Pool, ratelimit.ClientConfig{})
		leasing := limitertest.Of(t, client, config)
		var uses []leaseUse
		take := func(limiter *ratelimit.Limiter, n int64) {
			use := leaseUse{Policy: "bucket", N: n, Call: time.Now().UnixMicro()}
			result, err := limiter.AllowN(t.Context(), "bucket", n)
			require.NoError(t, err)
			require.True(t, result.Allowed)
			use.Return = time.Now().UnixMicro()
			use.learn(result)
			uses = append(uses, use)
		}
		for range 200 {
			take(leasing, 1)
		}
		pause(t.Context(), 600*time.Millisecond)
		for range 50 {
			take(leasing, 1)
		}
		rest, err := plain.Peek(t.Context(), "bucket")
		require.NoError(t, err)
		take(plain, rest.Remaining)
		require.NoError(t, leaseJudge{leaseWork: w}.judge(uses))
		require.NoError(t, client.ReturnLeases(t.Context()))
		if !slices.ContainsFunc(uses[200:250], func(u leaseUse) bool { return !u.Leased }) {
			return
		}
		require.Less(t, attempt, 50, "the machine is too slow for a lease that lasts")
	}
}

// Processes freeze now and then, and end. In the end, the rows have exactly the units that the processes allowed.
func TestLeasesOfProcessesAddUp(t *testing.T) {
	t.Parallel()

	random := random(t)
	for range testkit.Rounds(t, "ROUNDS", 1) {
		// A busy machine makes few calls within a span, so the span doubles until a lease is granted.
		for span, leased := 700*time.Millisecond, int64(0); leased == 0; span *= 2 {
			require.Less(t, span, 20*time.Second, "nothing is leased")
			w := leasesAtWork(day)
			w.Names = []string{"fixed", "sliding", "all"}
			w.Limit, w.Length, w.Pace = 1_000_000, span*3/7, span
			w.Timeout, w.Gap = amply, time.Millisecond
			db := pgtest.New(t)
			f := newLeaseFleet(t, w)
			f.together(random, db, 4, frozenBriefly, frozenForLong, frozenForLong)
			var decisions, statements int64
			decisions, leased, statements = f.sums()
			t.Logf("%d decisions, %d of them leased, %d statements", decisions, leased, statements)
			admitted := map[string]int64{}
			for _, u := range f.uses {
				if !u.back {
					admitted[u.Policy] += u.N
				}
			}
			for _, name := range w.Names {
				limiter := limitertest.New(t, db.Pool, ratelimit.Config{Name: name, Policy: w.policy(name)})
				result, err := limiter.Peek(t.Context(), name)
				require.NoError(t, err)
				require.Equal(t, w.Limit-admitted[name], result.Remaining, name)
			}
			for _, end := range f.ends {
				require.Zero(t, end.Lease.Stranded)
				f.requireBalance(end)
			}
		}
	}
}

// withClock returns a database whose clock a test can set, as an administrator or NTP does on other machines. All
// sessions see a change at once.
func withClock(t *testing.T, month time.Duration) (db *pgtest.DB, set func(offset time.Duration)) {
	t.Helper()
	db = withMonths(t, month)
	pgtest.Exec(t, db.Pool, "CREATE SEQUENCE public.clock_offset MINVALUE -1000000000000 START 0")
	pgtest.Exec(t, db.Pool, `CREATE FUNCTION public.settable_clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
		SELECT pg_catalog.clock_timestamp() + last_value * interval '1 microsecond' FROM public.clock_offset $$`)
	functions := pgtest.Scalar[[]string](t, db.Pool, `SELECT array_agg(oid::regproc::text) FROM pg_proc
		WHERE proname LIKE '%rate_limit_%' AND prosrc LIKE '%clock_timestamp()%'`)
	require.NotEmpty(t, functions)
	for _, function := range functions {
		pgtest.Rewrite(t, db.Pool, function, "clock_timestamp()", "public.settable_clock()")
	}
	db.Pool.Reset()
	return db, func(offset time.Duration) {
		pgtest.Exec(t, db.Pool, "SELECT setval('public.clock_offset', $1)", offset.Microseconds())
	}
}

// The database's clock is set while there are leases. No window in the results has more allowed units than the limit. There
// are only as many windows as the clock's progress allows.
func TestLeasesUnderAClockThatIsSet(t *testing.T) {
	t.Parallel()

	random := random(t)
	for range testkit.Rounds(t, "ROUNDS", 1) {
		// A busy machine makes few calls within a span, so the span doubles until a lease is granted.
		for span, leased := time.Second, int64(0); leased == 0; span *= 2 {
			require.Less(t, span, 20*time.Second, "nothing is leased")
			w := leasesAtWork(span)
			db, set := withClock(t, w.Window)
			f := newLeaseFleet(t, w)
			began, steps := time.Now(), time.Duration(0)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				for offset := time.Duration(0); ctx.Err() == nil; pause(ctx, time.Duration(random.Int64N(int64(w.Window)))) {
					step := time.Duration(random.Int64N(int64(3*w.Window))) - w.Window
					offset += step
					steps += max(step, 0)
					set(offset)
				}
			}()
			mine := rand.New(rand.NewPCG(random.Uint64(), 0))
			f.together(mine, db, 3, frozenBriefly, frozenBriefly, frozenForLong)
			cancel()
			<-ended
			j := leaseJudge{leaseWork: w, forward: time.Since(began) + steps}
			require.NoError(t, j.judge(f.uses))
			var decisions, statements int64
			decisions, leased, statements = f.sums()
			t.Logf("%d decisions, %d of them leased, %d statements; set forward by %v", decisions, leased, statements, steps)
		}
	}
}

// This is a negative control: the judge notices mistakes of the processes and of the database.
func TestJudgeOfLeasesCatches(t *testing.T) {
	t.Parallel()

	random := random(t)
	for name, broken := range map[string]struct {
		mistake leaseMistake
		name    string
		old     string
		new     string // replaces the text old in the database's refund function
	}{
		"leases that survive their window":   {mistake: survivesItsWindow},
		"leases that end by the wrong clock": {mistake: wrongClock},
		"what is left goes back twice": {
			old: "least(units, rolled.count)",
			new: fmt.Sprintf("least(CASE units WHEN %d THEN 1 ELSE 2 END * units, rolled.count)", refundedCost),
		},
		"what was spent goes back twice": {
			old: "least(units, rolled.count)",
			new: fmt.Sprintf("least(CASE units WHEN %d THEN 2 ELSE 1 END * units, rolled.count)", refundedCost),
		},
		"nothing": {},
	} {
		mine := rand.New(rand.NewPCG(random.Uint64(), 0))
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var caught error
			innocent := broken.mistake == "" && broken.old == ""
			for attempt := 0; caught == nil && attempt < 50 && (!innocent || attempt < 2); attempt++ {
				w := leasesAtWork(500 * time.Millisecond)
				w.Names, w.Limit, w.Timeout, w.Mistake = []string{"fixed"}, 400, amply, broken.mistake
				db := pgtest.New(t)
				if broken.old != "" {
					pgtest.Rewrite(t, db.Pool, "_rate_limit_fixed_refund", broken.old, broken.new)
				}
				f := newLeaseFleet(t, w)
				f.together(mine, db, 2, frozenBriefly, frozenForLong)
				caught = leaseJudge{leaseWork: w}.judge(f.uses)
			}
			if innocent {
				require.NoError(t, caught)
				return
			}
			require.Error(t, caught)
			t.Log(caught)
		})
	}
}
