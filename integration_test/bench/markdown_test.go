package bench

import (
	"fmt"
	"slices"
	"strings"

	"github.com/pgratelimit/ratelimit/integration_test/svg"
)

// column is a column of the tables, with the format of its figures.
type column struct {
	name, title string
	format      func(float64) string
}

// cell returns the figure of a row, or a dash if the row has none.
func (c column) cell(row *row) string {
	if value, ok := row.Median[c.name]; ok {
		return c.format(value)
	}
	return "–"
}

var columns = []column{
	{perSecond, "decisions/s", func(v float64) string { return svg.Thousands(int(v)) }},
	{againstRedis, "× redis_rate", ratio},
	{againstPlain, "× UPDATE by key", ratio},
	{p50, "p50", latency},
	{p99, "p99", latency},
	{serverCPU, "server CPU", latency},
	{clientCPU, "client CPU", latency},
	{walBytes, "WAL bytes", func(v float64) string { return fmt.Sprintf("%.1f", v) }},
}

// shown are the workloads whose subjects the report compares in a table each. A reader who needs the others, or the
// figures without a column, finds them in the file of data.
var shown = []string{oneCallerID, uniform64ID, hotSixteenID, busyID}

// markdown returns the report for readers.
func (r *report) markdown() string {
	var md strings.Builder
	p := func(format string, args ...any) { fmt.Fprintf(&md, format+"\n", args...) }
	table := func(rows ...[]string) { writeTable(&md, rows) }

	p("# Benchmark\n")
	p("%s\n", reading)
	if r.Plan.Mode == "quick" {
		p("**A quick run, which shows that everything works. Its figures say nothing.**\n")
	}
	p("Written by `%s` on %s, in %s. Do not edit.\n", r.Plan.Command, r.Date, r.Took)
	p("## The sliding window under all workloads\n")
	table(r.overview()...)

	p("## How it was measured\n")
	for _, fact := range r.Machine {
		p("- %s: %s", fact.Name, fact.Value)
	}
	p("\n%s\n", strings.ReplaceAll(method, "\n", " "))
	p(
		"Each figure is the median of %d rounds of %v each, after %v to warm up; a ratio is the median of the ratios of the rounds.\n",
		r.Plan.Rounds,
		r.Plan.Measured,
		r.Plan.WarmUp,
	)

	p("## Beside others\n")
	for _, result := range r.Results {
		if r.Plan.Mode == "partial" || slices.Contains(shown, result.ID) {
			p("### %s\n", result.Title)
			table(result.table()...)
		}
	}

	if len(r.OneCaller.Decision) > 0 {
		p("### One caller, in turn with `SELECT 1`\n")
		table([]string{"", "p50"},
			[]string{"**" + slidingWindow.title + "**", latency(middle(r.OneCaller.Decision))},
			[]string{"SELECT 1", latency(middle(r.OneCaller.SelectOne))})
	}

	if len(r.Denial.Nanoseconds) > 0 {
		p("## In the process\n")
		nanoseconds := middle(r.Denial.Nanoseconds)
		p("- A denial that the process remembers: %.0f ns, %.0f allocations.", nanoseconds, r.Denial.Allocations)
		p("- Memory of an idle limiter: %s bytes.", svg.Thousands(int(r.Memory.Idle)))
		p(
			"- Memory with %s denied keys: %s bytes; with %s of 512 bytes: %s.\n",
			svg.Thousands(r.Memory.DeniedKeys),
			svg.Thousands(int(r.Memory.Denied)),
			svg.Thousands(r.Memory.LongKeys),
			svg.Thousands(int(r.Memory.DeniedLong)),
		)
	}

	if len(r.Neighbour) > 0 {
		p("## What a limiter costs its neighbour\n")
		p(
			"pgbench's own TPC-B-like transactions, %d clients on a database of scale %d: on the same server as this library, and on the same "+
				"machine as redis_rate.\n",
			pgbenchClients,
			r.Plan.pgbenchScale,
		)
		rows := [][]string{{"beside", "pgbench tps", "of what it has alone", "average latency", "decisions/s"}}
		for _, n := range r.Neighbour {
			rows = append(rows, n.cells(r.Neighbour[0]))
		}
		table(rows...)
	}
	return strings.TrimSuffix(md.String(), "\n")
}

// reading tells how to read the figures, without naming any.
const reading = `This page is for people who want to know how fast the library is, and how its figures came about.

![Decisions per second, beside redis_rate and an UPDATE by key](benchmark.svg)

- **Concurrent calls of a process share statements.** So the more callers a process has, the more it decides, and a hot
  key is the fastest. One caller, or many processes with few callers, share little. Then redis_rate is faster.
- **Many small processes share statements through a service**, ` + "`pgratelimit serve`" + `. It is in the tables of 16 processes.
  For Envoy, all callers share one gRPC connection, and gRPC takes most of the time.
- **A remembered denial asks nobody.** If more keys are denied than calls come in a second, most denials ask the
  database.
- **Leases help if many processes ask for the same few keys**, and limits are large. They help little where each key is
  asked for seldom.
- **Your figures will differ.** Server and callers shared one machine here, which leaves the database less. Repeat the
  run on a machine like yours, with ` + "`make bench`" + `. ` + "`BENCH=quick`" + ` takes 2 minutes.
- [benchmark.json](benchmark.json) has all figures of all subjects in all workloads and rounds.`

// method explains how the figures were measured.
const method = `Server and callers share this machine. Postgres has its default settings, except for shared_buffers (a
quarter of the memory) and the number of connections. Subjects on Postgres share one pool of 16, and a service has 3.
redis_rate is shown with a pool of 16 and with go-redis's default pool. The ratio is to the faster of the two.
redis_rate also runs on go-redis's auto-pipelining client, which is experimental. Callers ask again as soon as they have
an answer. After each round, every admitted request was found in the table. For that, windows last 12 hours, and the
token bucket's clock stands still. The subjects of a workload take turns, and each round begins with another subject.
CPU and WAL are those of the server, divided by all decisions. The client's CPU is that of the callers' processes. Calls
"1 ms away" pass a proxy that delays. "UPDATE by key" decides nothing: each call adds 1 to a count in this library's
table. "Five round trips" is a transaction that reads, decides in Go, and writes.`

// beside are the workloads that the overview leaves out, because others say the same.
var beside = []string{"zipf-64", hot64ID, new64ID, "far-512", "4x8-new", fewRowsID, hot1ID}

// overview returns a line for each workload, with the sliding window's result.
func (r *report) overview() [][]string {
	names := []string{perSecond, againstRedis, againstPlain, p50, p99}
	rows := [][]string{{""}}
	for _, column := range columns {
		if slices.Contains(names, column.name) {
			rows[0] = append(rows[0], column.title)
		}
	}
	for _, result := range r.Results {
		row := result.find(slidingWindow)
		if row == nil || slices.Contains(beside, result.ID) {
			continue
		}
		cells := []string{result.Title}
		for _, column := range columns {
			if slices.Contains(names, column.name) {
				cells = append(cells, column.cell(row))
			}
		}
		rows = append(rows, cells)
	}
	return rows
}

// table returns the results of a workload, with all columns that have figures.
func (r *result) table() [][]string {
	header := []string{""}
	lines := make([][]string, len(r.Rows))
	for i, row := range r.Rows {
		lines[i] = []string{row.Subject}
		if row.Ours {
			lines[i][0] = "**" + row.Subject + "**"
		}
		if row.Missing != "" {
			lines[i][0] += ": " + row.Missing
		}
	}
	for _, column := range columns {
		cells := make([]string, len(r.Rows))
		measured := false
		for i, row := range r.Rows {
			_, ok := row.Median[column.name]
			cells[i], measured = column.cell(row), measured || ok
		}
		if !measured {
			continue
		}
		header = append(header, column.title)
		for i := range lines {
			lines[i] = append(lines[i], cells[i])
		}
	}
	return append([][]string{header}, lines...)
}

func (n *neighbourResult) cells(alone *neighbourResult) []string {
	if n.Missing != "" {
		return []string{n.Title + ": " + n.Missing, "–", "–", "–", "–"}
	}
	decisions := "–"
	if len(n.Decisions) > 0 {
		decisions = svg.Thousands(int(middle(n.Decisions)))
	}
	return []string{
		n.Title,
		svg.Thousands(int(middle(n.TPS))),
		fmt.Sprintf("%.0f %%", 100*middle(n.TPS)/middle(alone.TPS)),
		fmt.Sprintf("%.2f ms", middle(n.Latency)),
		decisions,
	}
}

// writeTable writes rows. The first row is the header. Numbers are aligned to the right.
func writeTable(md *strings.Builder, rows [][]string) {
	for i, row := range rows {
		fmt.Fprintf(md, "| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			fmt.Fprintf(md, "|---|%s\n", strings.Repeat("---:|", len(row)-1))
		}
	}
	md.WriteString("\n")
}

func ratio(v float64) string { return fmt.Sprintf("%.2f", v) }

// latency formats a number of microseconds.
func latency(us float64) string {
	switch {
	case us < 10:
		return fmt.Sprintf("%.2f µs", us)
	case us < 10_000:
		return fmt.Sprintf("%.0f µs", us)
	default:
		return fmt.Sprintf("%.1f ms", us/1000)
	}
}
