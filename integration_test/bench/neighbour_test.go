package bench

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
)

// neighbour is a load that runs on the same machine as an application.
type neighbour struct {
	title   string
	subject *subject // nil means that there is no load
	spread  spread
	rate    int // decisions a second; 0 means as many as possible
}

// nobody is the neighbour of an application that runs alone.
var nobody = neighbour{title: "nobody"}

const (
	neighbourCallers = 64
	pgbenchClients   = 8
)

// neighbourResult is how the application ran beside a neighbour. Each list has one figure per round.
type neighbourResult struct {
	Title     string    `json:"beside"`
	Missing   string    `json:"missing,omitempty"`
	TPS       []float64 `json:"tps"`
	Latency   []float64 `json:"latency_average_ms"`
	Decisions []float64 `json:"decisions_per_second,omitempty"`
}

// neighbour runs an application: pgbench's TPC-B-like transactions. Busy limiters run beside the application, on the
// same server or only on the same machine.
func (a *arena) neighbour(plan plan) []*neighbourResult {
	a.b.Helper()
	pgbench := a.pgbenchProgram()
	if pgbench == "" {
		return nil
	}
	a.exec("CREATE DATABASE neighbour")
	url := strings.Replace(a.server.URL(), "/postgres?", "/neighbour?", 1)
	run := func(args ...string) string {
		a.b.Helper()
		output, err := exec.CommandContext(a.ctx(), pgbench, append(args, url)...).CombinedOutput()
		require.NoError(a.b, err, string(output))
		return string(output)
	}
	run("--initialize", "--quiet", "--scale", strconv.Itoa(plan.pgbenchScale))
	work := func() (tps, latency float64) {
		output := run("--no-vacuum", "--protocol", "prepared", "--client", strconv.Itoa(pgbenchClients), "--jobs", "2",
			"--time", strconv.Itoa(int(plan.pgbench.Seconds())))
		return figureOf(output, `tps = ([\d.]+)`), figureOf(output, `latency average = ([\d.]+) ms`)
	}
	work() // warms up the application

	results := make([]*neighbourResult, len(plan.neighbourhood))
	for round := range plan.pgbenchRounds {
		for i := range plan.neighbourhood {
			i := (i + round) % len(plan.neighbourhood)
			n := plan.neighbourhood[i]
			if results[i] == nil {
				results[i] = &neighbourResult{Title: n.title}
			}
			a.progress("round %d of %d: pgbench beside %s", round+1, plan.pgbenchRounds, n.title)
			r := results[i]
			if n.subject == nil {
				tps, latency := work()
				r.TPS, r.Latency = append(r.TPS, tps), append(r.Latency, latency)
				continue
			}
			w := plan.groups[0][0]
			w.far, w.spread = false, n.spread
			c := a.contender(n.subject, w)
			if c == nil {
				r.Missing = a.missing(n.subject, w)
				continue
			}
			options := loadOptions{callers: neighbourCallers, timed: 16}
			if n.rate > 0 {
				options.pace = time.Second * neighbourCallers / time.Duration(n.rate)
			}
			load := startLoad(a.ctx(), c.take, w.keys(uint64(round)), options)
			a.wait(plan.WarmUp)
			load.measure()
			tps, latency := work()
			tally, err := load.stop()
			require.NoError(a.b, err)
			a.audit(n.title, c, tally)
			r.TPS, r.Latency = append(r.TPS, tps), append(r.Latency, latency)
			r.Decisions = append(r.Decisions, tally.perSecond())
		}
	}
	return results
}

// pgbenchProgram returns the path of pgbench, beside the server's programs or in PATH. It returns "" if there is none.
func (a *arena) pgbenchProgram() string {
	for _, pid := range a.postgresPIDs() {
		server, _ := os.Readlink("/proc/" + strconv.Itoa(pid) + "/exe")
		if program, err := exec.LookPath(filepath.Join(filepath.Dir(server), "pgbench")); err == nil {
			return program
		}
	}
	program, _ := exec.LookPath("pgbench")
	return program
}

func figureOf(output, pattern string) float64 {
	match := regexp.MustCompile(pattern).FindStringSubmatch(output)
	if match == nil {
		return 0
	}
	figure, _ := strconv.ParseFloat(match[1], 64)
	return figure
}
