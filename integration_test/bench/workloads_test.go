package bench

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/integration_test/svg"
)

// plan says what one run of the benchmark measures, and for how long.
type plan struct {
	Mode     string        `json:"mode"`
	Command  string        `json:"command"`
	Rounds   int           `json:"rounds"`
	WarmUp   time.Duration `json:"warm_up_ns"`
	Measured time.Duration `json:"measured_ns"`

	groups        [][]workload // each group has rounds of its own
	idleLimiters  int
	deniedKeys    int           // the number of keys whose denials are measured for their memory
	pgbenchScale  int           // pgbench's scale; 1 means 100,000 accounts
	pgbench       time.Duration // the length of one run
	pgbenchRounds int
	neighbourhood []neighbour
}

// dataset is a set of keys, all with the same limit.
type dataset struct {
	title  string
	prefix string // begins each key of this data set, and no other key
	size   int    // 0 means that each key is new
	limit  int64
	bySQL  bool // whether one statement creates its rows, for a sliding window
	key    func(i int) string
}

// ample is a limit that is never reached. Its product with the window in microseconds is just below 2^62, the maximum.
const ample = 100_000_000

func newDataset(title, prefix string, size int, limit int64) dataset {
	d := dataset{title: title, prefix: prefix, size: size, limit: limit}
	d.key = func(i int) string { return prefix + strconv.Itoa(i) }
	if size == 0 || size > 100_000 {
		return d
	}
	keys := make([]string, size)
	for i := range keys {
		keys[i] = d.key(i)
	}
	d.key = func(i int) string { return keys[i] }
	return d
}

// newcomers returns a data set whose keys are new at each request. The keys have no order, like addresses, so each key
// goes to another place in an index. The factor is odd, so all products modulo 2^64 differ.
func newcomers() dataset {
	const prefix = "new:"
	return dataset{title: "new keys", prefix: prefix, limit: ample, key: func(i int) string {
		return prefix + strconv.FormatUint(uint64(i)*0x9E3779B97F4A7C15, 36)
	}}
}

// rowsOf returns a data set that SQL creates. Its keys are computed on request, for any number of keys.
func rowsOf(size int) dataset {
	d := newDataset(svg.Thousands(size)+" rows", fmt.Sprintf("row-%d-", size), 0, ample)
	d.size, d.bySQL = size, true
	return d
}

// workload says which callers ask for which keys.
type workload struct {
	ID        string `json:"id"`
	Title     string `json:"title"`
	Processes int    `json:"processes"` // 1 means only this process
	Callers   int    `json:"callers"`   // in each process

	data     dataset
	spread   spread
	far      bool
	subjects []*subject
	warmUp   time.Duration // for subjects that have to learn which keys are busy
}

// spread is the sequence of keys that one caller asks for.
type spread func(rng *rand.Rand, keys int) func() int

func uniform(rng *rand.Rand, keys int) func() int { return func() int { return rng.IntN(keys) } }

// zipf asks for the k-th most popular key in proportion to 1/k^1.1. Of 100,000 keys, the first key gets one request in
// seven, and the first hundred keys get more than half of all requests.
func zipf(rng *rand.Rand, keys int) func() int {
	z := rand.NewZipf(rng, 1.1, 1, uint64(keys-1))
	return func() int { return int(z.Uint64()) }
}

func hot(*rand.Rand, int) func() int { return func() int { return 0 } }

// newKeys is the number of requests for new keys.
var newKeys atomic.Int64

func (w workload) keys(seed uint64) keySource {
	return func(caller int) func() string {
		if w.data.size == 0 {
			return func() string { return w.data.key(int(newKeys.Add(1))) }
		}
		pick := w.spread(rand.New(rand.NewPCG(seed, uint64(caller))), w.data.size)
		return func() string { return w.data.key(pick()) }
	}
}

// These are the IDs of the workloads that targets use.
const (
	oneCallerID  = "one-caller"
	uniform64ID  = "uniform-64"
	uniform512ID = "uniform-512"
	hot64ID      = "hot-64"
	hot512ID     = "hot-512"
	hot1ID       = "hot-1"
	new1ID       = "new-1"
	new64ID      = "new-64"
	new512ID     = "new-512"
	fourID       = "4x8"
	sixteenID    = "16x2"
	fewRowsID    = "few-rows"
	manyRowsID   = "many-rows"
	busyID       = "16x2-busy"
	newSixteenID = sixteenID + "-new"
	hotSixteenID = sixteenID + "-hot"
)

// fullPlan returns the plan of `make bench`, which takes 20 minutes.
func fullPlan() plan {
	redis := []*subject{redisPool16, redisStock, redisAuto}
	ours := []*subject{slidingWindow, fixedWindow, tokenBucket, durable, durableSync}
	limiters := join(ours, redis, []*subject{fiveRoundTrips, plainUpdate})
	everybody := join(limiters, []*subject{selectOne})
	withSets := join(everybody, []*subject{inProcess, allOfTwo, allOfThree, held, envoys})
	deniers := join([]*subject{slidingWindow, withoutDenials}, redis, []*subject{fiveRoundTrips, plainUpdate})
	few := []*subject{slidingWindow, redisPool16, redisAuto, plainUpdate}
	popular := join([]*subject{slidingWindow, durable}, redis, []*subject{fiveRoundTrips, plainUpdate})
	remote := join([]*subject{slidingWindow, durable}, redis, []*subject{fiveRoundTrips, plainUpdate, selectOne})

	users := newDataset("100,000 keys", "user:", 100_000, ample)
	busy := newDataset("5,000 keys", "busy:", 5_000, ample)
	fresh := newcomers()
	thousand := newDataset("1,000 denied keys", "denied:", 1_000, 1)
	hundredThousand := newDataset("100,000 denied keys", "locked-out:", 100_000, 1)

	return plan{
		Mode: "full", Command: "make bench", Rounds: 3, WarmUp: 300 * time.Millisecond, Measured: time.Second,
		groups: [][]workload{
			{
				{oneCallerID, "One caller, 100,000 keys", 1, 1, users, uniform, false, withSets, 0},
				{uniform64ID, "64 callers, 100,000 keys uniformly", 1, 64, users, uniform, false, withSets, 0},
				{uniform512ID, "512 callers, 100,000 keys uniformly", 1, 512, users, uniform, false, everybody, 0},
				{
					"zipf-64",
					"64 callers, 100,000 keys in a Zipf distribution (s = 1.1)",
					1,
					64,
					users,
					zipf,
					false,
					popular, 0,
				},
				{
					"zipf-512",
					"512 callers, 100,000 keys in a Zipf distribution (s = 1.1)",
					1,
					512,
					users,
					zipf,
					false,
					popular, 0,
				},
				{hot64ID, "64 callers, one hot key", 1, 64, users, hot, false, join(limiters, []*subject{envoys}), 0},
				{hot512ID, "512 callers, one hot key", 1, 512, users, hot, false, limiters, 0},
				{hot1ID, "One caller, one hot key", 1, 1, users, hot, false, join(few, []*subject{held}), 0},
				{new1ID, "One caller, each key new", 1, 1, fresh, nil, false, join(few, []*subject{durable}), 0},
				{new64ID, "64 callers, each key new", 1, 64, fresh, nil, false, limiters, 0},
				{
					new512ID,
					"512 callers, each key new",
					1,
					512,
					fresh,
					nil,
					false,
					join(few, []*subject{redisStock, durable}), 0,
				},
				{"denied-64", "64 callers, 1,000 keys, all denied", 1, 64, thousand, uniform, false, deniers, 0},
				{
					"locked-out-64",
					"64 callers, 100,000 keys, all denied",
					1,
					64,
					hundredThousand,
					uniform,
					false,
					deniers, 0,
				},
				{"far-1", "One caller, 100,000 keys, 1 ms away", 1, 1, users, uniform, true, remote, 0},
				{"far-64", "64 callers, 100,000 keys uniformly, 1 ms away", 1, 64, users, uniform, true, remote, 0},
				{"far-512", "512 callers, 100,000 keys uniformly, 1 ms away", 1, 512, users, uniform, true, remote, 0},
			},
			processWorkloads(users, fresh, few),
			leaseWorkloads(busy, 40*time.Second, few),
			rowWorkloads(10_000_000),
		},
		idleLimiters: 5_000, deniedKeys: 1_000_000, pgbenchScale: 10, pgbench: 3 * time.Second, pgbenchRounds: 3,
		neighbourhood: []neighbour{
			nobody,
			{"ratelimit, 64 callers", slidingWindow, uniform, 0}, {"redis_rate, 64 callers", redisPool16, uniform, 0},
			{"ratelimit, durable, 64 callers", durable, uniform, 0},
			{
				"ratelimit, 64 callers, one hot key",
				slidingWindow,
				hot,
				0,
			}, {"redis_rate, 64 callers, one hot key", redisPool16, hot, 0},
			{
				"ratelimit, 64 callers at 10,000 a second",
				slidingWindow,
				uniform,
				10_000,
			}, {"redis_rate, 64 callers at 10,000 a second", redisPool16, uniform, 10_000},
		},
	}
}

// quickPlan covers each target and the chart, but its figures are not reliable.
func quickPlan() plan {
	users := newDataset("20,000 keys", "user:", 20_000, ample)
	denied := newDataset("1,000 denied keys", "denied:", 1_000, 1)
	chart := []*subject{slidingWindow, redisPool16, fiveRoundTrips}
	few := []*subject{slidingWindow, redisPool16, plainUpdate}
	several := join(chart, []*subject{redisStock, redisAuto, plainUpdate, allOfTwo, allOfThree, held, envoys})
	lasting := join(chart, []*subject{plainUpdate, durable})
	deniers := []*subject{slidingWindow, withoutDenials, plainUpdate}
	busy := newDataset("5,000 keys", "busy:", 5_000, ample)
	fresh := newcomers()

	return plan{
		Mode: "quick", Command: "BENCH=quick make bench", Rounds: 2,
		WarmUp: 100 * time.Millisecond, Measured: 300 * time.Millisecond,
		groups: [][]workload{
			{
				{uniform64ID, "64 callers, 20,000 keys uniformly", 1, 64, users, uniform, false, several, 0},
				{uniform512ID, "512 callers, 20,000 keys uniformly", 1, 512, users, uniform, false, lasting, 0},
				{hot64ID, "64 callers, one hot key", 1, 64, users, hot, false, join(chart, []*subject{plainUpdate}), 0},
				{hot512ID, "512 callers, one hot key", 1, 512, users, hot, false, join(chart, []*subject{plainUpdate}), 0},
				{hot1ID, "One caller, one hot key", 1, 1, users, hot, false, join(few, []*subject{held}), 0},
				{new1ID, "One caller, each key new", 1, 1, fresh, nil, false, few, 0},
				{new64ID, "64 callers, each key new", 1, 64, fresh, nil, false, few, 0},
				{new512ID, "512 callers, each key new", 1, 512, fresh, nil, false, few, 0},
				{"denied-64", "64 callers, 1,000 keys, all denied", 1, 64, denied, uniform, false, deniers, 0},
				{"far-64", "64 callers, 20,000 keys uniformly, 1 ms away", 1, 64, users, uniform, true, few, 0},
			},
			processWorkloads(users, fresh, few),
			leaseWorkloads(busy, time.Second, few),
			rowWorkloads(500_000),
		},
		idleLimiters: 500, deniedKeys: 100_000, pgbenchScale: 5, pgbench: time.Second, pgbenchRounds: 1,
		neighbourhood: []neighbour{
			nobody, {"ratelimit, 64 callers", slidingWindow, uniform, 0}, {"redis_rate, 64 callers", redisPool16, uniform, 0},
		},
	}
}

// processWorkloads returns workloads for several small processes. Each process can combine only a few calls.
func processWorkloads(there, fresh dataset, subjects []*subject) (all []workload) {
	subjects = join(subjects, []*subject{served})
	for _, size := range []struct{ processes, callers int }{{4, 8}, {16, 2}} {
		id := fmt.Sprintf("%dx%d", size.processes, size.callers)
		of := func(id, title string, data dataset, spread spread, subjects []*subject) {
			title = fmt.Sprintf("%d processes of %d callers, %s", size.processes, size.callers, title)
			all = append(all, workload{
				ID: id, Title: title, Processes: size.processes, Callers: size.callers,
				data: data, spread: spread, subjects: subjects,
			})
		}
		of(id, there.title+" uniformly", there, uniform, subjects)
		of(id+"-new", "each key new", fresh, nil, subjects)
		of(id+"-hot", "one hot key", there, hot, join(subjects, []*subject{leased}))
	}
	return all
}

// leaseWorkloads returns workloads of busy keys. The warm-up lets a process learn which keys are busy.
func leaseWorkloads(busy dataset, warmUp time.Duration, subjects []*subject) []workload {
	return []workload{{
		ID: busyID, Title: "16 processes of 2 callers, " + busy.title + " uniformly", Processes: 16, Callers: 2,
		data: busy, spread: uniform, subjects: join(subjects, []*subject{served, leased}), warmUp: warmUp,
	}}
}

// rowWorkloads compares a table of this size with a table of 100,000 rows.
func rowWorkloads(many int) []workload {
	few, lots := rowsOf(100_000), rowsOf(many)
	return []workload{
		{fewRowsID, "64 callers, a table of " + few.title, 1, 64, few, uniform, false, []*subject{slidingWindow}, 0},
		{manyRowsID, "64 callers, a table of " + lots.title, 1, 64, lots, uniform, false, []*subject{slidingWindow}, 0},
	}
}

func join(lists ...[]*subject) (all []*subject) {
	for _, list := range lists {
		all = append(all, list...)
	}
	return all
}
