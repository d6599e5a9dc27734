package metrics

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/integration_test/svg"
)

// chartTemplate has the panels of the dashboard at their places in Grafana. Each panel shows the outage in the
// background.
const chartTemplate = svg.Head + `
{{- range .Panels}}
<g transform="translate({{.X}} {{.Y}})">
<text class="strong" x="0" y="0">{{.Title}}</text>
<text x="{{$.PanelWidth}}" y="0" text-anchor="end" font-size="12">{{.Highest}}</text>
{{- range .Lines}}
<rect x="{{.LegendX}}" y="{{.LegendY}}" width="9" height="9" rx="2" fill="{{.Colour}}"/>
<text x="{{.TextX}}" y="{{.TextY}}" font-size="11">{{.Name}}</text>
{{- end}}
<g transform="translate(0 {{$.PlotTop}})">
<rect x="{{$.OutageX}}" width="{{$.OutageWidth}}" height="{{$.PlotHeight}}" fill="#8b949e" fill-opacity="0.25"/>
{{- range .Lines}}
<path d="{{.Path}}" fill="none" stroke="{{.Colour}}" stroke-width="1.5"/>
{{- end}}
<line class="axis" x1="0" x2="{{$.PanelWidth}}" y1="{{$.PlotHeight}}" y2="{{$.PlotHeight}}"/>
{{- range $.Ticks}}
<text x="{{.X}}" y="{{$.TickY}}" font-size="11" text-anchor="{{.Anchor}}">{{.Text}}</text>
{{- end}}
</g>
</g>
{{- end}}
</svg>
`

const (
	panelWidth  = 400
	plotTop     = 42 // below two lines of legend
	plotHeight  = 90
	panelHeight = plotTop + plotHeight + 44
	letterWidth = 6 // average width of a letter in the legend
)

// colours are the colours of a panel's lines. They are readable on white and on black.
var colours = []string{"#2f81f7", "#d9534f", "#3fa34d", "#d98a1f", "#a371f7", "#8b949e", "#1fa7a7"}

type chart struct {
	Title, Description                     string
	Width, Height, Left                    int
	PanelWidth, PlotTop, PlotHeight, TickY int
	OutageX, OutageWidth                   string
	Ticks                                  []tick
	Panels                                 []chartPanel
}

type tick struct {
	X            int
	Anchor, Text string
}

type chartPanel struct {
	X, Y           int
	Title, Highest string
	Lines          []chartLine
}

type chartLine struct {
	Name, Colour, Path             string
	LegendX, LegendY, TextX, TextY int
}

type period struct{ from, to time.Time }

func (p period) seconds() float64 { return p.to.Sub(p.from).Seconds() }

// draw draws the panels of the dashboard for a period.
func draw(d dashboard, shown [][]series, all, outage period) ([]byte, error) {
	second := panelWidth / max(all.seconds(), 1)
	c := chart{
		Title: d.Title,
		Description: "First a transaction holds a key, then Postgres is stopped for a while (grey), " +
			"and at last the tables are swept.",
		Width: 2*svg.Left + 2*panelWidth + svg.Gap,
		Left:  svg.Left, PanelWidth: panelWidth, PlotTop: plotTop, PlotHeight: plotHeight, TickY: plotHeight + 15,
		OutageX:     fmt.Sprintf("%.1f", outage.from.Sub(all.from).Seconds()*second),
		OutageWidth: fmt.Sprintf("%.1f", outage.seconds()*second),
		Ticks: []tick{{0, "start", "0 s"}, {panelWidth / 2, "middle", fmt.Sprintf("%.0f s", all.seconds()/2)},
			{panelWidth, "end", fmt.Sprintf("%.0f s", all.seconds())}},
	}
	for i, p := range d.Panels {
		column, row := p.GridPos.X/12, p.GridPos.Y/8
		panel := chartPanel{
			X: svg.Left + column*(panelWidth+svg.Gap), Y: 80 + row*panelHeight,
			Title: p.Title,
		}
		highest := 0.0
		for _, s := range shown[i] {
			for _, point := range s.Values {
				if !math.IsNaN(point.Value) {
					highest = max(highest, point.Value)
				}
			}
		}
		panel.Highest = "up to " + withUnit(highest, p.FieldConfig.Defaults.Unit)
		x, y := 0, 9
		for j, s := range slices.SortedFunc(slices.Values(shown[i]), func(a, b series) int {
			return strings.Compare(a.name, b.name)
		}) {
			width := 15 + letterWidth*len(s.name) + 12
			if x > 0 && x+width > panelWidth {
				x, y = 0, y+15
			}
			panel.Lines = append(panel.Lines, chartLine{
				Name: s.name, Colour: colours[j%len(colours)],
				Path:    path(s, all.from, second, plotHeight/max(highest, 1e-9)),
				LegendX: x, LegendY: y, TextX: x + 13, TextY: y + 9,
			})
			x += width
		}
		c.Panels = append(c.Panels, panel)
		c.Height = max(c.Height, panel.Y+panelHeight-20)
	}
	var drawn bytes.Buffer
	err := template.Must(template.New("dashboard").Parse(chartTemplate)).Execute(&drawn, c)
	return drawn.Bytes(), err
}

// path returns the line of a series. The line is interrupted where a scrape has no value.
func path(s series, from time.Time, second, unit float64) string {
	var path strings.Builder
	last := math.Inf(-1)
	began := float64(from.UnixMilli()) / 1000
	for _, point := range s.Values {
		if math.IsNaN(point.Value) {
			continue
		}
		command := "L"
		if point.At-last > 1.5*scrapes.Seconds() {
			command = "M"
		}
		fmt.Fprintf(&path, "%s%.1f,%.1f", command, (point.At-began)*second, plotHeight-point.Value*unit)
		last = point.At
	}
	return path.String()
}

// withUnit formats a value as Grafana would.
func withUnit(value float64, unit string) string {
	switch unit {
	case "s":
		if value < 1 {
			return fmt.Sprintf("%.3g ms", 1000*value)
		}
		return fmt.Sprintf("%.3g s", value)
	case "bytes":
		return fmt.Sprintf("%.1f MiB", value/(1<<20))
	case "reqps", "ops", "cps":
		return svg.Thousands(int(math.Round(value))) + "/s"
	default:
		if value >= 1000 {
			return svg.Thousands(int(math.Round(value)))
		}
		return fmt.Sprintf("%.3g", value)
	}
}

func requireWellFormed(t *testing.T, drawn []byte) {
	t.Helper()
	require.NotContains(t, string(drawn), "NaN")
	decoder := xml.NewDecoder(bytes.NewReader(drawn))
	var err error
	for err == nil {
		_, err = decoder.Token()
	}
	require.ErrorIs(t, err, io.EOF)
}

func TestChart(t *testing.T) {
	t.Parallel()

	began := time.Unix(1_000_000, 0)
	at := func(second, value float64) point { return point{1_000_000 + second, value} }
	d := dashboard{Title: "Rate limits", Panels: []panel{{Title: "Latency"}, {Title: "Nothing"}}}
	d.Panels[0].FieldConfig.Defaults.Unit = "s"
	drawn, err := draw(d, [][]series{{
		{name: "slow", Values: []point{at(0, 0), at(1, 0.2), at(2, math.NaN()), at(4, 0.1)}},
		{name: "fast", Values: []point{at(0, 0.05)}},
	}, nil}, period{began, began.Add(4 * time.Second)}, period{began.Add(time.Second), began.Add(2 * time.Second)})
	require.NoError(t, err)
	requireWellFormed(t, drawn)
	for _, part := range []string{
		`d="M0.0,90.0L100.0,0.0M400.0,45.0" fill="none" stroke="` + colours[1], ">up to 200 ms<",
		`<rect x="100.0" width="100.0"`, ">4 s<",
	} {
		require.Contains(t, string(drawn), part)
	}
}
