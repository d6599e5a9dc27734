// Package bench compares this library with other limiters, and measures the costs of single features. The results are
// in docs/.
package bench

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
)

// poolSize is the most connections that a subject may have to its server.
const poolSize = 16

// arena is what all measurements share: one Postgres, one Redis, and a near and a far way to each of them.
type arena struct {
	b      *testing.B
	server *pgserver.Server
	admin  *pgx.Conn // for all statements that are not measured
	near   *pgxpool.Pool
	far    *pgxpool.Pool // the same server, with a longer round trip
	redis  *redisServer  // nil if this machine has no Redis

	stores     map[contenderID]*store // by subject, for the near pools
	contenders map[contenderID]*contender
	schemas    int // how many schemas were created

	url       string // the URL of the Postgres
	attached  bool   // whether another process has already created the subjects' data
	processes map[int][]*process
	distances []time.Duration
}

// BenchmarkSideBySide compares this library with other limiters: see `make bench`. It writes its results to a report,
// not to the output of package testing. So one iteration is enough, which is -benchtime 1x.
func BenchmarkSideBySide(b *testing.B) {
	plan, out := planOf(b), ""
	if text := os.Getenv(processVariable); text != "" {
		workInProcess(b, plan, text)
		return
	}
	if plan.Mode == "full" {
		out = "../../docs"
	}
	if dir := os.Getenv("BENCH_OUT"); dir != "" {
		out = dir
	}
	begun := time.Now()
	a := newArena(b)
	r := &report{Plan: plan, Machine: a.describe()}
	for _, workloads := range plan.groups {
		r.Results = append(r.Results, a.sideBySide(plan, workloads)...)
	}
	r.Machine = append(r.Machine, a.distanceFact()...)
	if plan.Mode != "partial" {
		r.OneCaller = a.oneCaller(plan)
		r.Denial = a.cachedDenial(plan)
		r.Memory = a.memory(plan)
		r.Neighbour = a.neighbour(plan)
	}
	r.finish(begun)

	fmt.Fprint(os.Stdout, "\n", r.markdown())
	if out != "" {
		require.NoError(b, r.write(out))
	}
}

// planOf returns the plan that the environment asks for. BENCH=quick makes all measurements short. BENCH_ONLY selects
// the workloads whose IDs match a pattern.
func planOf(b *testing.B) plan {
	b.Helper()
	plan := fullPlan()
	if os.Getenv("BENCH") == "quick" {
		plan = quickPlan()
	}
	if only := os.Getenv("BENCH_ONLY"); only != "" {
		plan.Mode, plan.Command = "partial", fmt.Sprintf("BENCH_ONLY='%s' %s", only, plan.Command)
		pattern, err := regexp.Compile(only)
		require.NoError(b, err)
		others := func(w workload) bool { return !pattern.MatchString(w.ID) }
		for i := range plan.groups {
			plan.groups[i] = slices.DeleteFunc(plan.groups[i], others)
		}
		require.NotEmpty(b, slices.Concat(plan.groups...), "no workload's ID matches BENCH_ONLY")
	}
	return plan
}

// sharedBuffers returns a quarter of the memory, as Postgres's manual advises, and at most 4 GB.
func sharedBuffers(b *testing.B) string {
	b.Helper()
	var total int // kB
	meminfo, err := os.ReadFile("/proc/meminfo")
	require.NoError(b, err)
	_, err = fmt.Sscanf(string(meminfo), "MemTotal: %d kB", &total)
	require.NoError(b, err)
	return fmt.Sprintf("%dMB", min(total/4/1024, 4096))
}

func newArena(b *testing.B) *arena {
	b.Helper()
	a := &arena{
		b: b, stores: map[contenderID]*store{}, contenders: map[contenderID]*contender{}, processes: map[int][]*process{},
	}

	a.progress("starting the servers")
	server, err := pgserver.Start(
		a.ctx(),
		pgserver.Config{Fsync: true, Settings: map[string]string{"shared_buffers": sharedBuffers(b)}},
	)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, server.Close()) })
	a.server, a.url = server, server.URL()
	a.admin, err = pgx.Connect(a.ctx(), server.URL())
	require.NoError(b, err)
	b.Cleanup(func() { _ = a.admin.Close(context.Background()) })
	for _, name := range []string{"fsync", "full_page_writes", "synchronous_commit"} {
		require.Equal(b, "on", a.setting(name), name)
	}

	a.near = a.newPool(nil)
	host, port := a.near.Config().ConnConfig.Host, a.near.Config().ConnConfig.Port
	proxy, err := netip.ParseAddrPort(startDelayProxy(b, net.JoinHostPort(host, strconv.Itoa(int(port))), farAway))
	require.NoError(b, err)
	a.far = a.newPool(func(config *pgxpool.Config) {
		config.ConnConfig.Host, config.ConnConfig.Port = proxy.Addr().String(), proxy.Port()
	})
	a.redis = startRedis(b)
	return a
}

func (a *arena) newPool(configure func(*pgxpool.Config)) *pgxpool.Pool {
	a.b.Helper()
	config, err := pgxpool.ParseConfig(a.url)
	require.NoError(a.b, err)
	config.MaxConns = poolSize
	if configure != nil {
		configure(config)
	}
	pool, err := pgxpool.NewWithConfig(a.ctx(), config)
	require.NoError(a.b, err)
	a.b.Cleanup(pool.Close)
	return pool
}

// pool returns the pool that all subjects on Postgres share.
func (a *arena) pool(far bool) *pgxpool.Pool {
	if far {
		return a.far
	}
	return a.near
}

// postgresPIDs returns the server's processes. It returns no processes if the server runs in a container.
func (a *arena) postgresPIDs() []int {
	a.b.Helper()
	pids, err := a.server.PIDs()
	require.NoError(a.b, err)
	return pids
}

// ctx returns a context that can be cancelled, like a request's context. So a driver has to watch the context.
func (a *arena) ctx() context.Context { return a.b.Context() }

func (a *arena) exec(sql string, args ...any) {
	a.b.Helper()
	_, err := a.admin.Exec(a.ctx(), sql, args...)
	require.NoError(a.b, err)
}

func (a *arena) setting(name string) string {
	a.b.Helper()
	var value string
	require.NoError(a.b, a.admin.QueryRow(a.ctx(), "SELECT current_setting($1)", name).Scan(&value))
	return value
}

// progress tells the user how far the benchmark is. Standard output is for the report.
func (a *arena) progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "bench %s  %s\n", time.Now().Format(time.TimeOnly), fmt.Sprintf(format, args...))
}

// sideBySide measures workloads in rounds. In each round, all subjects of a workload run in turn, so other activity on
// the machine affects all of them. Each round begins with another subject and another workload.
func (a *arena) sideBySide(plan plan, workloads []workload) []*result {
	a.b.Helper()
	defer a.endProcesses()
	results := make([]*result, len(workloads))
	for i, w := range workloads {
		results[i] = &result{workload: w}
		for _, s := range w.subjects {
			row := &row{Subject: s.title, Ours: s.ours}
			if c := a.contender(s, w); c == nil { // creates and fills the subject's table before the first round
				row.Missing = a.missing(s, w)
			}
			results[i].Rows = append(results[i].Rows, row)
		}
	}
	a.exec("CHECKPOINT")
	for round := range plan.Rounds {
		for i := range workloads {
			i := (i + round) % len(workloads)
			w := workloads[i]
			a.progress("round %d of %d: %s", round+1, plan.Rounds, w.Title)
			a.noteDistance()
			for j := range w.subjects {
				j := (j + round) % len(w.subjects)
				s, row := w.subjects[j], results[i].Rows[j]
				if c := a.contender(s, w); c != nil {
					row.Rounds = append(row.Rounds, a.measure(plan, w, s, c, uint64(round)))
				}
			}
		}
	}
	return results
}

// measure runs one subject under one workload for one round, and checks the resulting table.
func (a *arena) measure(plan plan, w workload, s *subject, c *contender, seed uint64) figures {
	a.b.Helper()
	if w.Processes > 1 {
		tally, costs := a.inProcesses(w, s, c, seed)
		a.audit(w.Title+": "+s.title, c, tally)
		return newFigures(tally, costs, c.pool != nil)
	}
	options := loadOptions{callers: w.Callers, timed: 16}
	if w.Callers == 1 && len(c.pids()) > 0 {
		options.timed = 1
	}
	runtime.GC() // keeps the garbage of earlier subjects out of the measurement
	var tally tally
	costs := a.costsOf(c, func() {
		load := startLoad(a.ctx(), c.take, w.keys(seed), options)
		a.wait(c.warmUp(plan, w))
		load.measure()
		a.wait(plan.Measured)
		var err error
		tally, err = load.stop()
		require.NoError(a.b, err, "%s: %s", w.Title, s.title)
		c.giveBack(a)
	})

	a.audit(w.Title+": "+s.title, c, tally)
	return newFigures(tally, costs, c.pool != nil)
}

// audit compares the callers' answers with the expected answers, and with the table.
func (a *arena) audit(what string, c *contender, tally tally) {
	a.b.Helper()
	if c.data.limit == 1 {
		require.Zero(a.b, tally.admitted, "%s: admitted what it must deny", what)
	} else {
		require.Equal(a.b, tally.total, tally.admitted, "%s: denied what it must admit", what)
	}
	if c.taken != nil {
		c.expected += tally.admitted
		require.Equal(a.b, c.expected, c.taken(), "%s: the table has not what it admitted", what)
	}
}

func (a *arena) wait(d time.Duration) {
	select {
	case <-time.After(d):
	case <-a.ctx().Done():
	}
}
