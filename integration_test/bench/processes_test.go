package bench

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// processVariable is the environment variable that tells a process of a benchmark where the servers are.
const processVariable = "BENCH_PROCESS"

// servers are the servers that all processes share.
type servers struct {
	Postgres string `json:"postgres"` // its URL
	Redis    string `json:"redis"`    // its address, or "" if this machine has none
}

// job is what a process does in one round: one subject under one workload.
type job struct {
	Workload string `json:"workload"` // the workload's ID
	Subject  string `json:"subject"`  // the subject's title
	Place    int    `json:"place"`    // see store.place
	Seed     uint64 `json:"seed"`
	NewKeys  int64  `json:"new_keys"` // see newKeys
}

// newKeysOfJob is more than the number of new keys in one job.
const newKeysOfJob = 100_000_000

// outcome is the result of the callers in one process, with their costs.
type outcome struct {
	Measured  int64           `json:"measured"`
	Elapsed   time.Duration   `json:"elapsed"`
	Latencies []time.Duration `json:"latencies"`
	Total     int64           `json:"total"`
	Admitted  int64           `json:"admitted"`
	CPU       time.Duration   `json:"cpu"`
}

// process is another process of this program. It does jobs until its standard input ends. When this process ends in any
// way, the operating system ends that standard input.
type process struct {
	*exec.Cmd
	stdin   io.WriteCloser
	jobs    *json.Encoder
	answers *json.Decoder // a pipe, because package testing uses standard output
	output  bytes.Buffer
}

// startProcesses returns n processes. The processes run until endProcesses, because starting a process takes longer
// than a round.
func (a *arena) startProcesses(n int) []*process {
	a.b.Helper()
	if started := a.processes[n]; started != nil {
		return started
	}
	to := servers{Postgres: a.url}
	if a.redis != nil {
		to.Redis = a.redis.near
	}
	text, err := json.Marshal(to)
	require.NoError(a.b, err)
	program, err := os.Executable()
	require.NoError(a.b, err)
	for range n {
		reader, writer, err := os.Pipe()
		require.NoError(a.b, err)
		p := &process{
			Cmd: exec.Command(program, "-test.run=^$", "-test.bench=^BenchmarkSideBySide$", "-test.benchtime=1x"),
		}
		p.Env = append(os.Environ(), processVariable+"="+string(text))
		p.Stdout, p.Stderr = &p.output, &p.output
		p.ExtraFiles = []*os.File{writer}
		p.stdin, err = p.StdinPipe()
		require.NoError(a.b, err)
		p.jobs, p.answers = json.NewEncoder(p.stdin), json.NewDecoder(reader)
		require.NoError(a.b, p.Start())
		require.NoError(a.b, writer.Close()) // so that reading ends when the process ends
		a.processes[n] = append(a.processes[n], p)
	}
	return a.processes[n]
}

func (a *arena) endProcesses() {
	a.b.Helper()
	for _, processes := range a.processes {
		for _, p := range processes {
			_ = p.stdin.Close()
			if err := p.Wait(); err != nil {
				a.b.Errorf("a process of the benchmark: %v\n%s", err, &p.output)
			}
		}
	}
	clear(a.processes)
}

// inProcesses is like measure, but with several processes that begin at the same time.
func (a *arena) inProcesses(w workload, s *subject, c *contender, seed uint64) (all tally, spent costs) {
	a.b.Helper()
	processes := a.startProcesses(w.Processes)
	send := func(p *process, message any) {
		a.b.Helper()
		require.NoError(a.b, p.jobs.Encode(message), "a process of the benchmark has ended")
	}
	receive := func(p *process, message any) {
		a.b.Helper()
		require.NoError(a.b, p.answers.Decode(message), "a process of the benchmark has ended")
	}
	for i, p := range processes {
		next := job{Workload: w.ID, Subject: s.title, Place: c.place, Seed: seed*uint64(w.Processes) + uint64(i)}
		next.NewKeys = newKeys.Add(newKeysOfJob) - newKeysOfJob
		send(p, next)
	}
	var ready bool
	for _, p := range processes {
		receive(p, &ready)
	}
	var client, elapsed time.Duration
	spent = a.costsOf(c, func() {
		for _, p := range processes {
			send(p, true)
		}
		for _, p := range processes {
			var o outcome
			receive(p, &o)
			all.measured += o.Measured
			all.total += o.Total
			all.admitted += o.Admitted
			all.latencies = append(all.latencies, o.Latencies...)
			elapsed += o.Elapsed
			client += o.CPU
		}
	})
	slices.Sort(all.latencies)
	all.elapsed = elapsed / time.Duration(w.Processes)
	spent.clientCPU = client
	return all, spent
}

// workInProcess is the main function of a process of the benchmark.
func workInProcess(b *testing.B, plan plan, text string) {
	var to servers
	require.NoError(b, json.Unmarshal([]byte(text), &to))
	a := &arena{b: b, url: to.Postgres, attached: true, contenders: map[contenderID]*contender{}}
	a.near = a.newPool(nil)
	if to.Redis != "" {
		a.redis = &redisServer{near: to.Redis}
	}
	jobs, answers := json.NewDecoder(os.Stdin), json.NewEncoder(os.NewFile(3, "answers"))
	for {
		var next job
		err := jobs.Decode(&next)
		if err == io.EOF {
			return
		}
		require.NoError(b, err)
		w, c, first := a.attach(plan, next)
		warmUp := c.warmUp(plan, w)
		if first { // each connection has to plan the statement first
			warmUp *= 4
		}
		require.NoError(b, answers.Encode(true))
		var begin bool
		require.NoError(b, jobs.Decode(&begin))
		require.NoError(b, answers.Encode(a.do(w, c, next.Seed, warmUp, plan.Measured)))
	}
}

// attach returns a subject that another process has opened, with enough connections for all callers. The result first
// is true for the first job with this subject.
func (a *arena) attach(plan plan, next job) (w workload, c *contender, first bool) {
	a.b.Helper()
	workloads := slices.Concat(plan.groups...)
	i := slices.IndexFunc(workloads, func(w workload) bool { return w.ID == next.Workload })
	require.GreaterOrEqual(a.b, i, 0, next.Workload)
	w = workloads[i]
	i = slices.IndexFunc(w.subjects, func(s *subject) bool { return s.title == next.Subject })
	require.GreaterOrEqual(a.b, i, 0, next.Subject)
	s := w.subjects[i]

	id := contenderID{subject: s, data: w.data.title}
	first = a.contenders[id] == nil
	if first {
		a.schemas = next.Place
		kept := s.open(a, w.data)
		a.contenders[id] = kept.connect(false)
		a.contenders[id].store = kept
	}
	conns := make([]*pgxpool.Conn, w.Callers)
	for i := range conns {
		var err error
		conns[i], err = a.near.Acquire(a.ctx())
		require.NoError(a.b, err)
	}
	for _, conn := range conns {
		conn.Release()
	}
	newKeys.Store(next.NewKeys)
	return w, a.contenders[id], first
}

// do runs a load in this process, with the same calls as measure.
func (a *arena) do(w workload, c *contender, seed uint64, warmUp, measured time.Duration) outcome {
	a.b.Helper()
	cpu := cpuTime(os.Getpid())
	load := startLoad(a.ctx(), c.take, w.keys(seed), loadOptions{callers: w.Callers, timed: 1})
	a.wait(warmUp)
	load.measure()
	a.wait(measured)
	t, err := load.stop()
	require.NoError(a.b, err)
	c.giveBack(a)
	cpu = cpuTime(os.Getpid()) - cpu
	if c.pool != nil {
		a.flushStatistics(c.pool)
	}
	return outcome{t.measured, t.elapsed, t.latencies, t.total, t.admitted, cpu}
}
