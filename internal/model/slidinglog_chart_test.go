package model_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// docs/slidinglog.svg shows how many requests a SlidingWindow and a SlidingLog let through, for the same traffic and
// the same limit.

// drawVariable makes the test write the chart. Without it, the test compares the chart with the file.
const drawVariable = "RATELIMIT_TEST_DRAW"

const (
	chartSeconds = 800 // seconds; each one is a pixel wide
	chartLimit   = 100 // requests a minute
	chartLeft    = 40
	chartBottom  = 330 // pixels; two units are three pixels high
)

// The colours are readable on white and on black. Text is lighter if the reader's system asks for a dark theme.
const chartTemplate = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 366" width="880" height="366" role="img" aria-labelledby="title desc" font-family="sans-serif" font-size="13">
<title id="title">Taken in the last minute, with a limit of 100</title>
<desc id="desc">The same bursts of requests, decided by both. In any minute SlidingLog admits at most {{.Log.Most}}, SlidingWindow {{.Window.Most}}.</desc>
<style>
	text { fill: #6e7681 }
	.strong { fill: #6e7681; font-weight: bold }
	.axis { stroke: #8b949e; stroke-width: 1 }
	path { fill: none; stroke-width: 1.5 }
	@media (prefers-color-scheme: light) { text { fill: #57606a } .strong { fill: #24292f } }
	@media (prefers-color-scheme: dark) { text { fill: #9da7b1 } .strong { fill: #e6edf3 } }
</style>
<text class="strong" x="24" y="24" font-size="17">Taken in the last minute, with a limit of 100</text>
<text x="24" y="44">Both decide the same {{.Requests}} requests, which come in bursts. SlidingWindow denied {{.TooEarly}} for which there was room.</text>
<rect x="24" y="58" width="12" height="12" rx="2" fill="#2f81f7"/>
<text x="42" y="69">SlidingLog: at most {{.Log.Most}} in any minute</text>
<rect x="324" y="58" width="12" height="12" rx="2" fill="#d9534f"/>
<text x="342" y="69">SlidingWindow: at most {{.Window.Most}}</text>
<path d="{{.Window.Path}}" stroke="#d9534f"/>
<path d="{{.Log.Path}}" stroke="#2f81f7"/>
{{- range .Ticks}}
<line class="axis" x1="{{.X}}" x2="{{.X}}" y1="330" y2="335"/>
<text x="{{.X}}" y="352" text-anchor="middle">{{.Text}}</text>
{{- end}}
<line class="axis" x1="40" x2="840" y1="330" y2="330"/>
<line class="axis" x1="40" x2="840" y1="180" y2="180" stroke-dasharray="4 4"/>
<text x="32" y="184" text-anchor="end">100</text>
<text x="32" y="334" text-anchor="end">0</text>
</svg>
`

// chartLine is a policy in the chart, with its decisions.
type chartLine struct {
	model.Rules
	Path  string // the SVG path that draws the line
	Most  int64  // the most units in any minute
	state model.State
	taken []int64 // times in microseconds; each request costs 1
	y     int64   // height of the line
}

// within returns the number of units taken in the minute that ends at t.
func (l *chartLine) within(t int64) int64 {
	for len(l.taken) > 0 && l.taken[0] <= t-minute {
		l.taken = l.taken[1:]
	}
	return int64(len(l.taken))
}

func (l *chartLine) ask(t int64) {
	var d model.Decision
	if l.state, d = l.Decide(l.state, t, 1); d.Granted == 1 {
		l.taken = append(l.taken, t)
		l.Most = max(l.Most, l.within(t))
	}
}

func TestChartOfSlidingLogAndSlidingWindow(t *testing.T) {
	t.Parallel()
	type tick struct {
		X    int
		Text string
	}
	chart := struct {
		Log, Window        *chartLine
		Requests, TooEarly int
		Ticks              []tick
	}{
		Log:    &chartLine{Rules: model.SlidingLog{chartLimit, time.Minute}},
		Window: &chartLine{Rules: model.SlidingWindow{chartLimit, time.Minute}},
	}
	for minutes := 0; minutes*60 <= chartSeconds; minutes += 2 {
		chart.Ticks = append(chart.Ticks, tick{chartLeft + minutes*60, fmt.Sprintf("%d min", minutes)})
	}

	r := rand.New(rand.NewPCG(2026, 0)) // a fixed seed gives the same traffic each time
	var log, window strings.Builder
	burst := int64(0) // the time of the next request
	left := 0         // requests left in this burst
	for s := range int64(chartSeconds) {
		for ; burst < (s+1)*second; left-- {
			if left == 0 {
				left = 10 + r.IntN(110)
				burst += (2 + r.Int64N(38)) * second
				continue
			}
			now := c0 + burst
			room := chart.Window.within(now) < chartLimit
			was := len(chart.Window.taken)
			chart.Window.ask(now)
			if room && len(chart.Window.taken) == was {
				chart.TooEarly++
			}
			chart.Log.ask(now)
			chart.Requests++
			burst += 20_000 + r.Int64N(80_000)
		}
		for line, path := range map[*chartLine]*strings.Builder{chart.Log: &log, chart.Window: &window} {
			x, y := chartLeft+s, chartBottom-3*line.within(c0+(s+1)*second)/2
			switch {
			case s == 0:
				fmt.Fprintf(path, "M%d %d", x, y)
			case y != line.y:
				fmt.Fprintf(path, "H%dV%d", x, y)
			}
			if line.y = y; s == chartSeconds-1 {
				fmt.Fprintf(path, "H%d", x+1)
			}
		}
	}
	chart.Log.Path, chart.Window.Path = log.String(), window.String()
	require.EqualValues(t, chartLimit, chart.Log.Most)
	require.Greater(t, chart.Window.Most, int64(chartLimit))

	var svg bytes.Buffer
	require.NoError(t, template.Must(template.New("chart").Parse(chartTemplate)).Execute(&svg, chart))
	const file = "../../docs/slidinglog.svg"
	if os.Getenv(drawVariable) != "" {
		require.NoError(t, os.WriteFile(file, svg.Bytes(), 0o644))
	}
	committed, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(committed), svg.String(), "set %s=1 to draw it anew", drawVariable)
}
