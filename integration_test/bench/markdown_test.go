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
	{againstAuto, "× auto-pipelining", ratio},
	{p50, "p50", latency},
	{p99, "p99", latency},
	{serverCPU, "server CPU", latency},
	{clientCPU, "client CPU", latency},
	{walBytes, "WAL bytes", func(v float64) string { return fmt.Sprintf("%.1f", v) }},
	{xids, "xids", func(v float64) string { return fmt.Sprintf("%.4f", v) }},
	{hotShare, "HOT", func(v float64) string { return fmt.Sprintf("%.2f %%", v) }},
}

// markdown returns the report for readers.
func (r *report) markdown() string {
	var md strings.Builder
	p := func(format string, args ...any) { fmt.Fprintf(&md, format+"\n", args...) }
	table := func(rows ...[]string) { writeTable(&md, rows) }

	p("# Benchmark\n")
	if r.Plan.Mode == "quick" {
		p("**A quick run, which shows that everything works. Its figures say nothing.**\n")
	}
	p("Written by `%s` on %s, in %s. Do not edit.\n", r.Plan.Command, r.Date, r.Took)
	var rows [][]string
	if r.Plan.Mode != "partial" {
		p("## Targets\n")
		rows = [][]string{{"", "at least", "aim", "measured", "met"}}
		for _, t := range r.Targets {
			rows = append(rows, []string{t.Row, t.AtLeast, t.Aim, t.Measured, t.Met})
		}
		table(rows...)
	}

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

	p("## All workloads\n")
	for _, result := range r.Results {
		p("### %s\n", result.Title)
		table(result.table()...)
	}

	if len(r.OneCaller.Decision) > 0 {
		p("### One caller, in turn with `SELECT 1`\n")
		table([]string{"", "p50"},
			[]string{"**" + slidingWindow.title + "**", latency(middle(r.OneCaller.Decision))},
			[]string{"SELECT 1", latency(middle(r.OneCaller.SelectOne))})
	}

	if len(r.Neighbour) > 0 {
		p("## What a limiter costs its neighbour\n")
		p(
			"pgbench's own TPC-B-like transactions, %d clients on a database of scale %d: on the same server as this library, and on the same "+
				"machine as redis_rate.\n",
			pgbenchClients,
			r.Plan.pgbenchScale,
		)
		rows = [][]string{{"beside", "pgbench tps", "of what it has alone", "average latency", "decisions/s"}}
		for _, n := range r.Neighbour {
			rows = append(rows, n.cells(r.Neighbour[0]))
		}
		table(rows...)
	}
	return strings.TrimSuffix(md.String(), "\n")
}

// method explains how the figures were measured.
const method = `Server and callers share this machine. Postgres is as it comes but for shared_buffers (a quarter of the memory), and takes more connections; the
subjects on it share one pool of 16. redis_rate is shown with a pool of 16 and with go-redis's own default, and compared by whichever was faster under the
workload; beside them it runs on go-redis's auto-pipelining client, which is experimental and coalesces commands as this library
does. Callers ask again as soon as they have been answered. Every request that was admitted, in warm-ups too, was found in the
table after each round; so that this can be seen, windows last 12 hours, and for the token bucket the clock stands still. In a round the subjects of a workload follow one upon the other, beginning with another one in each round.
CPU, WAL, transaction ids and HOT updates are those of the server from the first to the last request, warm-up included, divided by
all decisions; the client is the processes of the callers. 1 ms away is through a proxy in this process.
Where there are several processes, each has clients and pools of its own, all begin at once, and the first warm-up takes
four times as long. "UPDATE by key" decides nothing: for each call it adds 1 to a count in this library's table with one
statement, an UPDATE, or an INSERT ... ON CONFLICT DO UPDATE where each key is new.`

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
		if row == nil {
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
