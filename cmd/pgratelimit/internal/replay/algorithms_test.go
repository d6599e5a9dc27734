package replay

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"os"
	"slices"
	"testing"
	"text/template"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
)

var update = flag.Bool("update", false, "write docs/algorithms.svg")

const (
	chartLeft   = 16
	chartSecond = 3.2 // pixels
	chartSpan   = 240 // seconds
	chartTop    = 148 // the y of the bottom of the first lane
	chartLane   = 84
	chartColumn = 4 // seconds; their requests are drawn in one column
	chartUnit   = 6 // the height of a request
)

// The colours are readable on white and on black. Text is lighter if the reader's system asks for a dark theme. A
// denied request is hollow, for readers who cannot tell the colours apart.
const chartTemplate = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {{.Height}}" width="800" height="{{.Height}}" role="img" aria-labelledby="title desc" font-family="sans-serif" font-size="13">
<title id="title">The same requests, five algorithms</title>
<desc id="desc">Each has a limit of 10 a minute, and decides the same {{.Requests}} requests.{{range .Lanes}} {{.Name}} admits {{.Admitted}}, and up to {{.Most}} within a minute.{{end}}</desc>
<style>
	text { fill: #6e7681 }
	.strong { fill: #6e7681; font-weight: bold }
	.axis { stroke: #8b949e; stroke-width: 1 }
	.window { stroke: #8b949e; stroke-width: 1; fill: none }
	.allowed { fill: #2f81f7 }
	.denied { fill: #d9534f; fill-opacity: .15; stroke: #d9534f; stroke-width: 1 }
	.most { fill: #d29922; fill-opacity: .2 }
	@media (prefers-color-scheme: light) { text { fill: #57606a } .strong { fill: #24292f } }
	@media (prefers-color-scheme: dark) { text { fill: #9da7b1 } .strong { fill: #e6edf3 } }
</style>
<text class="strong" x="16" y="24" font-size="17">The same requests, five algorithms</text>
<text x="16" y="44">Each has a limit of 10 a minute. The same {{.Requests}} requests come in two bursts of 20, and some alone.</text>
<rect class="allowed" x="16" y="60" width="11" height="4"/><text x="34" y="68">admitted</text>
<rect class="denied" x="112.5" y="60.5" width="10" height="3"/><text x="130" y="68">denied</text>
<path class="window" d="M196.5 59v6h46v-6"/><text x="252" y="68">a window of a minute</text>
<rect class="most" x="400" y="56" width="24" height="14"/><text x="432" y="68">the minute in which it admits most</text>
{{range .Lanes}}<text class="strong" x="16" y="{{.TextY}}">{{.Name}}</text>
<text x="136" y="{{.TextY}}">{{.About}}</text>
<text x="784" y="{{.TextY}}" text-anchor="end">admits {{.Admitted}} of {{$.Requests}}</text>
{{.Picture}}
{{end}}<line class="axis" x1="16" x2="784" y1="{{.AxisY}}" y2="{{.AxisY}}"/>
{{.Axis}}
</svg>
`

// chartLaneOf is what an algorithm makes of the requests.
type chartLaneOf struct {
	Name, policy, About string
	Admitted, Most      int // Most is the most that it admits within a minute
	TextY               int
	Picture             string
}

// chartRequests returns the times of the requests, in microseconds after noon. One burst is across the end of the
// window that begins with the first request, and the other is across the end of a minute of the clock.
func chartRequests() []int64 {
	times := []int64{20e6}
	for _, border := range []int64{80e6, 180e6} {
		for i := range int64(20) {
			times = append(times, border-7_900_000+i*800_000)
		}
		for i := range int64(3) {
			times = append(times, border+14e6+i*10e6)
		}
	}
	return times
}

func chartX(at int64) float64 { return chartLeft + chartSecond*float64(at)/1e6 }

// draw draws the requests as the policy decides them.
func (l *chartLaneOf) draw(t *testing.T, bottom float64) {
	t.Helper()
	noon := time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC).UnixMicro()
	policy, err := ParsePolicy(l.policy)
	require.NoError(t, err)
	r := newRun(policy, nil)
	requests, windows := &picture{}, &picture{}
	var taken []int64 // the times of the admitted requests
	mostFrom, window := int64(0), int64(0)
	heights := map[int64]float64{}
	for _, at := range chartRequests() {
		class := "denied"
		if r.decide(request{at: noon + at, cost: 1}, "") {
			class = "allowed"
			taken = append(taken, at)
			first := slices.IndexFunc(taken, func(before int64) bool { return before > at-60e6 })
			if within := len(taken) - first; within >= l.Most {
				l.Most, mostFrom = within, taken[first]
			}
		}
		if end := l.windowEnd(r.keys[0].state[0]) - noon; end > window {
			window = end
			fmt.Fprintf(windows, `<path class="window" d="M%.1f %.0fv6`, chartX(end-60e6)+1, bottom+4)
			if end <= chartSpan*1e6 {
				fmt.Fprintf(windows, `H%.1fv-6"/>`, chartX(end)-1)
			} else {
				fmt.Fprintf(windows, `H%.1f"/>`, chartX(chartSpan*1e6))
			}
		}
		column := at / (chartColumn * 1e6)
		requests.bar(class, chartX(column*chartColumn*1e6)+1, bottom-heights[column]-1, chartColumn*chartSecond-2, chartUnit-2)
		heights[column] += chartUnit
	}
	l.Admitted = len(taken)
	p := &picture{}
	p.bar("most", chartX(mostFrom), bottom, 60*chartSecond, 36)
	p.text(chartX(mostFrom+58e6), bottom-20, "end", fmt.Sprintf("%d in this minute", l.Most))
	l.Picture = p.String() + requests.String() + windows.String()
}

// windowEnd returns when the window ends that the state is in, or 0 if the algorithm does not count in windows.
func (l *chartLaneOf) windowEnd(s model.State) int64 {
	switch l.Name {
	case "FixedWindow", "SlidingWindow":
		return s.WindowStart + 60e6
	case "CalendarWindow":
		return s.WindowStart + s.Scale
	}
	return 0
}

// docs/algorithms.svg shows what each algorithm admits of the same requests.
func TestChartOfTheAlgorithms(t *testing.T) {
	t.Parallel()
	lanes := []chartLaneOf{
		{Name: "FixedWindow", policy: "fixed 10/1m", About: "a window begins with a request, and forgets the one before"},
		{Name: "SlidingWindow", policy: "sliding 10/1m", About: "a part of the window before still counts"},
		{Name: "TokenBucket", policy: "bucket 10 1/6s", About: "10 at once, and one more every 6 seconds"},
		{Name: "SlidingLog", policy: "log 10/1m", About: "remembers when each request came"},
		{Name: "CalendarWindow", policy: "every 10/minute", About: "a window is a minute of the clock"},
	}
	axis, bottom := &picture{}, chartTop
	for i := range lanes {
		lanes[i].TextY = bottom - 46
		lanes[i].draw(t, float64(bottom))
		bottom += chartLane
	}
	bottom += 24 - chartLane
	for minute := range int64(chartSpan/60 + 1) {
		anchor := map[int64]string{0: "start", chartSpan / 60: "end"}[minute]
		fmt.Fprintf(axis, `<line class="axis" x1="%.1[1]f" x2="%.1[1]f" y1="%[2]d" y2="%[3]d"/>`, chartX(minute*60e6), bottom, bottom+5)
		axis.text(chartX(minute*60e6), float64(bottom+20), cmp.Or(anchor, "middle"), fmt.Sprintf("12:%02d", minute))
	}
	var svg bytes.Buffer
	require.NoError(t, template.Must(template.New("chart").Parse(chartTemplate)).Execute(&svg, map[string]any{
		"Height": bottom + 28, "Requests": len(chartRequests()), "Lanes": lanes, "AxisY": bottom, "Axis": axis.String(),
	}))
	const file = "../../../../docs/algorithms.svg"
	if *update {
		require.NoError(t, os.WriteFile(file, svg.Bytes(), 0o644)) //nolint:gosec // everybody may read it
	}
	committed, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(committed), svg.String(), "go test -run TestChartOfTheAlgorithms . -update draws it anew")
}
