package bench

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"testing"
	"text/template"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/integration_test/svg"
)

// chartTemplate has a panel for each workload, with an axis of its own. On a common scale, the slowest workload would
// be invisible.
const chartTemplate = svg.Head + `{{- range .Legend}}
<rect x="{{.X}}" y="58" width="12" height="12" rx="2" fill="{{.Colour}}"/>
<text x="{{.TextX}}" y="69">{{.Text}}</text>
{{- end}}
{{- range .Panels}}
<g transform="translate({{.X}} {{.Y}})">
{{- range .Bars}}
<rect x="{{.X}}" y="{{.Y}}" width="{{$.BarWidth}}" height="{{.Height}}" rx="2" fill="{{.Colour}}"/>
<text class="strong" x="{{.Middle}}" y="{{.LabelY}}" text-anchor="middle" font-size="12">{{.Label}}</text>
{{- end}}
<line class="axis" x1="0" x2="{{$.PanelWidth}}" y1="{{$.Baseline}}" y2="{{$.Baseline}}"/>
<text class="strong" x="{{$.PanelMiddle}}" y="{{$.NameY}}" text-anchor="middle">{{.Name}}</text>
<text x="{{$.PanelMiddle}}" y="{{$.NoteY}}" text-anchor="middle" font-size="12">{{.Note}}</text>
</g>
{{- end}}
</svg>
`

// These are the chart's sizes in pixels.
const (
	panelWidth    = 190
	barWidth      = 50
	barGap        = 10
	panelsInRow   = 4
	panelTop      = 110 // where the highest bar ends
	panelBaseline = 250
	rowHeight     = 215
)

type chart struct {
	Width, Height, Left, PanelWidth, PanelMiddle, BarWidth, Baseline, NameY, NoteY int
	Title, Description                                                             string
	Legend                                                                         []legend
	Panels                                                                         []panel
}

type legend struct {
	X, TextX     int
	Colour, Text string
}

type panel struct {
	X, Y       int
	Name, Note string
	Bars       []bar
}

type bar struct {
	X, Y, Height, Middle, LabelY int
	Colour, Label                string
}

// chart draws the decisions per second of this library, of redis_rate and of a plain UPDATE. In the upper panels, one
// statement decides many calls of one process. The lower panels show single calls and new keys.
func (r *report) chart() ([]byte, error) {
	c := chart{
		Left: svg.Left, Width: 2*svg.Left + panelsInRow*panelWidth + (panelsInRow-1)*svg.Gap,
		Height:     panelBaseline + rowHeight + 58,
		PanelWidth: panelWidth, PanelMiddle: panelWidth / 2, BarWidth: barWidth, Baseline: panelBaseline,
		NameY: panelBaseline + 22, NoteY: panelBaseline + 40,
		Title:       "Decisions per second",
		Description: "Sliding window, one machine for server and callers. Each group has its own scale.",
	}
	if r.Plan.Mode != "full" {
		c.Title += ", in a quick run, which says nothing"
	}
	series := []legend{
		{Colour: "#2f81f7", Text: "ratelimit (Postgres)"},
		{Colour: "#d9534f", Text: "redis_rate (Redis)"},
		{Colour: "#8b949e", Text: "UPDATE by key, no decision (Postgres)"},
	}
	for i := range series {
		series[i].X = svg.Left + 190*i
		series[i].TextX = series[i].X + 18
	}
	c.Legend = series

	for i, w := range []struct{ id, name, note string }{
		{uniform64ID, "64 callers", ""},
		{uniform512ID, "512 callers", ""},
		{hot64ID, "64 callers", "one hot key"},
		{hot512ID, "512 callers", "one hot key"},
		{hot1ID, "one caller", "one hot key"},
		{new64ID, "64 callers", "each key new"},
		{fourID, "4 processes of 8 callers", ""},
		{sixteenID, "16 processes of 2 callers", ""},
	} {
		result := r.result(w.id)
		rows := []*row{result.find(slidingWindow), result.redis(), result.find(plainUpdate)}
		highest := 1.0
		for _, row := range rows {
			if row != nil {
				highest = max(highest, row.Median[perSecond])
			}
		}
		if w.note == "" {
			w.note = result.data.title
		}
		p := panel{
			X: svg.Left + i%panelsInRow*(panelWidth+svg.Gap), Y: i / panelsInRow * rowHeight, Name: w.name, Note: w.note,
		}
		for j, row := range rows {
			b := bar{X: barGap + j*(barWidth+barGap), Colour: series[j].Colour, Label: "–"}
			if row != nil {
				b.Height = max(1, int((panelBaseline-panelTop)*row.Median[perSecond]/highest))
				b.Label = short(row.Median[perSecond])
			}
			b.Y = panelBaseline - b.Height
			b.Middle, b.LabelY = b.X+barWidth/2, b.Y-6
			p.Bars = append(p.Bars, b)
		}
		c.Panels = append(c.Panels, p)
	}

	var svg bytes.Buffer
	err := template.Must(template.New("chart").Parse(chartTemplate)).Execute(&svg, c)
	return svg.Bytes(), err
}

// short formats a number with about three digits: 1.25M, 98k, 1.9k.
func short(v float64) string {
	switch {
	case v >= 1e6:
		return fmt.Sprintf("%.2fM", v/1e6)
	case v >= 1e4:
		return fmt.Sprintf("%.0fk", v/1e3)
	default:
		return fmt.Sprintf("%.1fk", v/1e3)
	}
}

func TestChart(t *testing.T) {
	t.Parallel()
	rows := func(values ...float64) (all []*row) {
		for i, s := range []*subject{slidingWindow, redisPool16, plainUpdate} {
			f := figures{perSecond: values[i]}
			all = append(all, &row{Subject: s.title, Rounds: []figures{f}, Median: f})
		}
		return all
	}
	r := &report{Results: []*result{
		{workload: workload{ID: uniform64ID}, Rows: rows(98_300, 48_912, 6_410)},
		{workload: workload{ID: hot512ID}, Rows: rows(1_254_321, 61_000, 1_903)},
	}}
	svg, err := r.chart()
	require.NoError(t, err)
	for _, label := range []string{"98k", "49k", "6.4k", "1.25M", "1.9k", "–"} {
		require.Contains(t, string(svg), ">"+label+"<")
	}
	decoder := xml.NewDecoder(bytes.NewReader(svg))
	for err == nil {
		_, err = decoder.Token()
	}
	require.ErrorIs(t, err, io.EOF)
}
