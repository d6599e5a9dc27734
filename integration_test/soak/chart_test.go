package soak

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/integration_test/svg"
)

// soakTemplate has a panel for each quantity over time, with a line for each fault in the background.
const soakTemplate = svg.Head + `<defs>
<g id="faults" stroke-opacity="0.35">
<path d="{{.Faults}}" stroke="{{.Grey}}"/>
<path d="{{.Crashes}}" stroke="{{.Red}}"/>
</g>
</defs>
{{- range .Panels}}
<g transform="translate({{.X}} {{.Y}})">
<text class="strong" x="0" y="-10">{{.Name}}</text>
<text x="{{$.PanelWidth}}" y="-10" text-anchor="end" font-size="12">{{.Highest}}</text>
<use href="#faults"/>
{{- range .Lines}}
<polyline points="{{.Points}}" fill="none" stroke="{{.Colour}}" stroke-width="1.5"/>
{{- end}}
<line class="axis" x1="0" x2="{{$.PanelWidth}}" y1="{{$.PanelHeight}}" y2="{{$.PanelHeight}}"/>
</g>
{{- end}}
</svg>
`

const (
	soakPanelWidth  = 250
	soakPanelHeight = 90
	soakPanelRow    = 140
	soakColumns     = 3

	soakBlue, soakRed, soakGrey = "#2f81f7", "#d9534f", "#8b949e"
)

type soakChart struct {
	Width, Height, Left, PanelWidth, PanelHeight int
	Title, Description, Grey, Red                string
	Faults, Crashes                              string // SVG paths
	Panels                                       []soakPanel
}

type soakPanel struct {
	X, Y          int
	Name, Highest string
	Lines         []soakLine
}

type soakLine struct{ Points, Colour string }

// chart draws the samples over time.
func (s *soak) chart(length time.Duration) ([]byte, error) {
	span := max(length.Seconds(), 1)
	for _, sample := range s.samples {
		span = max(span, sample.At)
	}
	c := soakChart{
		Left:        svg.Left,
		PanelWidth:  soakPanelWidth,
		PanelHeight: soakPanelHeight,
		Title:       "A soak of " + length.String(),
		Grey:        soakGrey,
		Red:         soakRed,
	}
	crashes := 0
	for _, e := range s.events {
		line := fmt.Sprintf("M%.1f,0V%d", e.At/span*soakPanelWidth, soakPanelHeight)
		if e.crash {
			c.Crashes += line
			crashes++
		} else {
			c.Faults += line
		}
	}
	c.Description = fmt.Sprintf(
		"%s calls, %s of them granted; %d faults (grey), %d of them crashes of the server (red); %d contradictions.",
		svg.Thousands(
			int(s.calls.Load()),
		),
		svg.Thousands(int(s.granted.Load())),
		len(s.events),
		crashes,
		len(s.violations),
	)

	mega := func(of func(soakSample) int64) func(int) float64 {
		return func(i int) float64 { return float64(of(s.samples[i])) / (1 << 20) }
	}
	plain := func(of func(soakSample) int64) func(int) float64 {
		return func(i int) float64 { return float64(of(s.samples[i])) }
	}
	// pace returns the growth of one quantity over ten samples, divided by the growth of another quantity.
	pace := func(of, by func(soakSample) float64) func(int) float64 {
		return func(i int) float64 {
			then, now := s.samples[max(i-10, 0)], s.samples[i]
			if by(now) <= by(then) {
				return 0
			}
			return (of(now) - of(then)) / (by(now) - by(then))
		}
	}
	calls := func(s soakSample) float64 { return float64(s.Calls) }
	for i, p := range []struct {
		name, format string
		of           []func(i int) float64
	}{
		{"Calls per second", "%.0f", []func(int) float64{pace(calls, func(s soakSample) float64 { return s.At })}},
		{"Rows of both tables", "%.0f", []func(int) float64{plain(func(s soakSample) int64 { return s.Rows })}},
		{"Dead tuples", "%.0f", []func(int) float64{plain(func(s soakSample) int64 { return s.DeadTuples })}},
		{"Tables: ephemeral (blue), durable", "%.1f MiB", []func(int) float64{
			mega(func(s soakSample) int64 { return s.EphemeralBytes }), mega(func(s soakSample) int64 { return s.DurableBytes }),
		}},
		{"Indexes", "%.1f MiB", []func(int) float64{mega(func(s soakSample) int64 { return s.IndexBytes })}},
		{"HOT share of updates", "%.2f", []func(int) float64{pace(
			func(s soakSample) float64 { return float64(s.HOTUpdates) }, func(s soakSample) float64 { return float64(s.Updates) })}},
		{"Transaction ids per call", "%.2f", []func(int) float64{pace(func(s soakSample) float64 { return float64(s.TransactionIDs) }, calls)}},
		{"Connections (blue), goroutines", "%.0f", []func(int) float64{
			plain(func(s soakSample) int64 { return s.Connections }), plain(func(s soakSample) int64 { return s.Goroutines }),
		}},
		{"Live heap of the callers", "%.1f MiB", []func(int) float64{mega(func(s soakSample) int64 { return s.HeapBytes })}},
	} {
		panel := soakPanel{
			X:    svg.Left + i%soakColumns*(soakPanelWidth+svg.Gap),
			Y:    90 + i/soakColumns*soakPanelRow,
			Name: p.name,
		}
		highest := 0.0
		for _, of := range p.of {
			for i := range s.samples {
				highest = max(highest, of(i))
			}
		}
		panel.Highest = "up to " + fmt.Sprintf(p.format, highest)
		for i, of := range p.of {
			var points strings.Builder
			for j, sample := range s.samples {
				fmt.Fprintf(
					&points,
					"%.1f,%.1f ",
					sample.At/span*soakPanelWidth,
					soakPanelHeight*(1-of(j)/max(highest, 1e-9)),
				)
			}
			panel.Lines = append(
				panel.Lines,
				soakLine{Points: strings.TrimSpace(points.String()), Colour: []string{soakBlue, soakGrey}[i]},
			)
		}
		c.Panels = append(c.Panels, panel)
		c.Height = panel.Y + soakPanelRow - 30
	}
	c.Width = 2*svg.Left + soakColumns*soakPanelWidth + (soakColumns-1)*svg.Gap

	var svg bytes.Buffer
	err := template.Must(template.New("soak").Parse(soakTemplate)).Execute(&svg, c)
	return svg.Bytes(), err
}

func TestSoakChart(t *testing.T) {
	t.Parallel()
	s := &soak{
		events:  []soakEvent{{At: 1, Fault: "kill -9", crash: true}},
		samples: []soakSample{{At: 1, Rows: 50, Calls: 100}, {At: 2, Rows: 100, Calls: 300}},
	}
	for _, s := range []*soak{s, {}} { // a run may end before its first sample
		svg, err := s.chart(2 * time.Second)
		require.NoError(t, err)
		require.NotContains(t, string(svg), "NaN")
		decoder := xml.NewDecoder(bytes.NewReader(svg))
		for err == nil {
			_, err = decoder.Token()
		}
		require.ErrorIs(t, err, io.EOF)
	}
	svg, err := s.chart(2 * time.Second)
	require.NoError(t, err)
	require.Contains(t, string(svg), "125.0,45.0 250.0,0.0", "rows")
	require.Contains(t, string(svg), "up to 200<", "calls per second")
	require.Contains(t, string(svg), "1 of them crashes")
	require.Contains(t, string(svg), `d="M125.0,0V90" stroke="`+soakRed)
}
