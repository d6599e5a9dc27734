package integration_test

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"time"
)

// plan is what one run of the benchmark measures, and for how long.
type plan struct {
	Mode     string        `json:"mode"`
	Command  string        `json:"command"`
	Rounds   int           `json:"rounds"`
	WarmUp   time.Duration `json:"warm_up_ns"`
	Measured time.Duration `json:"measured_ns"`

	groups        [][]workload // each group runs in rounds of its own
	idleLimiters  int
	deniedKeys    int           // asked for, to see what their denials need of memory
	pgbenchScale  int           // 100,000 accounts each
	pgbench       time.Duration // of one run
	pgbenchRounds int
	neighbourhood []neighbour
}

// dataset is a set of keys, all with the same limit.
type dataset struct {
	title  string
	prefix string // of each key, and of no other data set's keys
	size   int    // 0: each key is new
	limit  int64
	bySQL  bool // filled by one statement, for a sliding window
	key    func(i int) string
}

// ample is a limit that is never reached. Times window in microseconds it is close to 2^62, the most that there may be.
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

// rowsOf is a data set that is made by SQL. Its keys are made as they are asked for, however many or few there are.
func rowsOf(size int) dataset {
	d := newDataset(thousands(size)+" rows", fmt.Sprintf("row-%d-", size), 0, ample)
	d.size, d.bySQL = size, true
	return d
}

// workload is who asks for what.
type workload struct {
	ID      string `json:"id"`
	Title   string `json:"title"`
	Callers int    `json:"callers"`

	data     dataset
	spread   spread
	far      bool
	subjects []*subject
}

// spread is which keys of a number of keys one caller asks for, one after the other.
type spread func(rng *rand.Rand, keys int) func() int

func uniform(rng *rand.Rand, keys int) func() int { return func() int { return rng.IntN(keys) } }

// zipf asks for the k-th most popular key in proportion to 1/k^1.1. Of 100,000 keys, the first gets one request in seven and
// the first hundred get more than half.
func zipf(rng *rand.Rand, keys int) func() int {
	z := rand.NewZipf(rng, 1.1, 1, uint64(keys-1))
	return func() int { return int(z.Uint64()) }
}

func hot(*rand.Rand, int) func() int { return func() int { return 0 } }

// newKeys is how many keys of data sets without a size have been asked for.
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

// The workloads that the targets are about, by their IDs.
const (
	oneCallerID  = "one-caller"
	uniform64ID  = "uniform-64"
	uniform512ID = "uniform-512"
	hot64ID      = "hot-64"
	hot512ID     = "hot-512"
	fewRowsID    = "few-rows"
	manyRowsID   = "many-rows"
)

// fullPlan is what `make bench` runs, in a quarter of an hour.
func fullPlan() plan {
	redis := []*subject{redisPool16, redisStock, redisAuto}
	ours := []*subject{slidingWindow, fixedWindow, tokenBucket, durable, durableSync}
	limiters := join(ours, redis, []*subject{fiveRoundTrips, inProcess})
	everybody := join(limiters, []*subject{plainUpdate, selectOne})
	withSets := join(everybody, []*subject{allOfTwo, allOfThree})
	deniers := join([]*subject{slidingWindow, withoutDenials}, redis, []*subject{fiveRoundTrips, inProcess})
	remote := join([]*subject{slidingWindow, durable}, redis, []*subject{fiveRoundTrips, plainUpdate, selectOne})

	users := newDataset("100,000 keys", "user:", 100_000, ample)
	fresh := newDataset("new keys", "new:", 0, ample)
	thousand := newDataset("1,000 denied keys", "denied:", 1_000, 1)
	hundredThousand := newDataset("100,000 denied keys", "locked-out:", 100_000, 1)

	return plan{
		Mode: "full", Command: "make bench", Rounds: 3, WarmUp: 300 * time.Millisecond, Measured: time.Second,
		groups: [][]workload{
			{
				{oneCallerID, "One caller, 100,000 keys", 1, users, uniform, false, withSets},
				{uniform64ID, "64 callers, 100,000 keys uniformly", 64, users, uniform, false, withSets},
				{uniform512ID, "512 callers, 100,000 keys uniformly", 512, users, uniform, false, everybody},
				{"zipf-64", "64 callers, 100,000 keys in a Zipf distribution (s = 1.1)", 64, users, zipf, false, join(limiters, []*subject{plainUpdate})},
				{"zipf-512", "512 callers, 100,000 keys in a Zipf distribution (s = 1.1)", 512, users, zipf, false, join(limiters, []*subject{plainUpdate})},
				{hot64ID, "64 callers, one hot key", 64, users, hot, false, join(limiters, []*subject{plainUpdate})},
				{hot512ID, "512 callers, one hot key", 512, users, hot, false, join(limiters, []*subject{plainUpdate})},
				{"new-64", "64 callers, each key new", 64, fresh, nil, false, join(ours, redis, []*subject{fiveRoundTrips})},
				{"denied-64", "64 callers, 1,000 keys, all denied", 64, thousand, uniform, false, deniers},
				{"locked-out-64", "64 callers, 100,000 keys, all denied", 64, hundredThousand, uniform, false, deniers},
				{"far-1", "One caller, 100,000 keys, 1 ms away", 1, users, uniform, true, remote},
				{"far-64", "64 callers, 100,000 keys uniformly, 1 ms away", 64, users, uniform, true, remote},
				{"far-512", "512 callers, 100,000 keys uniformly, 1 ms away", 512, users, uniform, true, remote},
			},
			rowWorkloads(10_000_000),
		},
		idleLimiters: 5_000, deniedKeys: 1_000_000, pgbenchScale: 10, pgbench: 3 * time.Second, pgbenchRounds: 3,
		neighbourhood: []neighbour{
			nobody,
			{"ratelimit, 64 callers", slidingWindow, uniform, 0}, {"redis_rate, 64 callers", redisPool16, uniform, 0},
			{"ratelimit, durable, 64 callers", durable, uniform, 0},
			{"ratelimit, 64 callers, one hot key", slidingWindow, hot, 0}, {"redis_rate, 64 callers, one hot key", redisPool16, hot, 0},
			{"ratelimit, 64 callers at 10,000 a second", slidingWindow, uniform, 10_000}, {"redis_rate, 64 callers at 10,000 a second", redisPool16, uniform, 10_000},
		},
	}
}

// quickPlan has something for each target and for the chart, and says nothing reliable.
func quickPlan() plan {
	users := newDataset("20,000 keys", "user:", 20_000, ample)
	denied := newDataset("1,000 denied keys", "denied:", 1_000, 1)
	chart := []*subject{slidingWindow, redisPool16, fiveRoundTrips}

	return plan{
		Mode: "quick", Command: "BENCH=quick make bench", Rounds: 3, WarmUp: 100 * time.Millisecond, Measured: 300 * time.Millisecond,
		groups: [][]workload{
			{
				{uniform64ID, "64 callers, 20,000 keys uniformly", 64, users, uniform, false, join(chart, []*subject{redisStock, redisAuto, allOfTwo, allOfThree})},
				{uniform512ID, "512 callers, 20,000 keys uniformly", 512, users, uniform, false, join(chart, []*subject{durable})},
				{hot64ID, "64 callers, one hot key", 64, users, hot, false, chart},
				{hot512ID, "512 callers, one hot key", 512, users, hot, false, chart},
				{"denied-64", "64 callers, 1,000 keys, all denied", 64, denied, uniform, false, []*subject{slidingWindow, withoutDenials}},
				{"far-64", "64 callers, 20,000 keys uniformly, 1 ms away", 64, users, uniform, true, []*subject{slidingWindow, redisPool16}},
			},
			rowWorkloads(1_000_000),
		},
		idleLimiters: 500, deniedKeys: 100_000, pgbenchScale: 5, pgbench: time.Second, pgbenchRounds: 1,
		neighbourhood: []neighbour{
			nobody, {"ratelimit, 64 callers", slidingWindow, uniform, 0}, {"redis_rate, 64 callers", redisPool16, uniform, 0},
		},
	}
}

// rowWorkloads compare a table of so many rows with one of 100,000.
func rowWorkloads(many int) []workload {
	few, lots := rowsOf(100_000), rowsOf(many)
	return []workload{
		{fewRowsID, "64 callers, a table of " + few.title, 64, few, uniform, false, []*subject{slidingWindow}},
		{manyRowsID, "64 callers, a table of " + lots.title, 64, lots, uniform, false, []*subject{slidingWindow}},
	}
}

func join(lists ...[]*subject) (all []*subject) {
	for _, list := range lists {
		all = append(all, list...)
	}
	return all
}
