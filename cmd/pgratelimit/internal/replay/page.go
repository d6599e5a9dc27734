package replay

import (
	_ "embed"
	"fmt"
	"html/template"
	"math"
	"os"
	"strings"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

//go:embed page.tmpl.html
var pageText string

var page = template.Must(template.New("page").Funcs(template.FuncMap{
	"percent": percent, "overTime": overTime, "curve": curve, "short": cli.Short, "groupBars": groupBars,
	"busiestSpan": busiestSpan,
	"span":        func(seconds float64) string { return cli.Span(int64(seconds * 1e6)) },
}).Parse(pageText))

// writePage writes a report as a page that needs nothing from the network.
func writePage(file string, r *Report) error {
	var text strings.Builder
	if err := page.Execute(&text, r); err != nil {
		return err
	}
	return os.WriteFile(file, []byte(text.String()), 0o600)
}

// The size of a picture in pixels. The rest of the height is for the text below.
const (
	pictureWidth  = 720
	pictureHeight = 160
)

// picture is an SVG. Its colours are classes of the page, or of its own style.
type picture struct{ strings.Builder }

func newPicture(title string) *picture {
	p := &picture{}
	fmt.Fprintf(p, `<svg viewBox="0 0 %d %d" role="img"><title>%s</title>`, pictureWidth, pictureHeight+32,
		template.HTMLEscapeString(title))
	return p
}

func (p *picture) bar(class string, x, bottom, width, height float64) {
	if height > 0 {
		fmt.Fprintf(p, `<rect class="%s" x="%.1f" y="%.1f" width="%.1f" height="%.1f"/>`,
			class, x, bottom-height, width, height)
	}
}

func (p *picture) text(x, y float64, anchor, text string) {
	fmt.Fprintf(p, `<text x="%.0f" y="%.0f" text-anchor="%s">%s</text>`, x, y, anchor, template.HTMLEscapeString(text))
}

// label writes a text below the picture.
func (p *picture) label(x float64, anchor, text string) { p.text(x, pictureHeight+24, anchor, text) }

func (p *picture) end() template.HTML {
	p.WriteString("</svg>")
	return template.HTML(p.String()) //nolint:gosec // all texts in it are escaped
}

// overTime draws how many requests were allowed and denied over time.
func overTime(t Totals) template.HTML {
	p := newPicture(fmt.Sprintf("%d allowed and %d denied over time by %s", t.Allowed, t.Denied, t.Policy))
	most := int64(1)
	for _, s := range t.Over {
		most = max(most, s.Allowed+s.Denied)
	}
	width := pictureWidth / float64(max(len(t.Over), 1))
	for i, s := range t.Over {
		allowed := float64(s.Allowed) / float64(most) * pictureHeight
		denied := float64(s.Denied) / float64(most) * pictureHeight
		p.bar("allowed", float64(i)*width, pictureHeight, max(width-0.5, 0.5), allowed)
		p.bar("denied", float64(i)*width, pictureHeight-allowed, max(width-0.5, 0.5), denied)
	}
	if n := len(t.Over); n > 0 {
		p.label(0, "start", cli.Instant(t.Over[0].Begin))
		p.label(pictureWidth, "end", cli.Instant(t.Over[n-1].Begin))
	}
	return p.end()
}

// curve draws the share of denied requests by limit. Both axes are logarithmic.
func curve(s *Sweep) template.HTML {
	p := newPicture("The share of denied requests by limit")
	if len(s.Curve) == 0 {
		return p.end()
	}
	last := s.Curve[len(s.Curve)-1].Limit
	for _, point := range s.Curve { // a limit above the first that denies nothing says nothing
		if point.Denied == 0 {
			last = min(last, point.Limit)
		}
	}
	across := func(limit int64) float64 {
		return 6 + (pictureWidth-12)*math.Log(float64(limit))/math.Log(float64(max(last, 2)))
	}
	const least = 1e-5 // the share at the bottom
	var points []string
	for _, point := range s.Curve {
		if point.Limit > last {
			break
		}
		height := (pictureHeight - 12) * (1 - math.Log(max(point.DeniedShare, least))/math.Log(least))
		points = append(points, fmt.Sprintf("%.1f,%.1f", across(point.Limit), pictureHeight-height-6))
		class := "point"
		if s.Limit != nil && *s.Limit == point.Limit {
			class = "found"
		}
		fmt.Fprintf(p, `<circle class="%s" cx="%.1f" cy="%.1f" r="4"><title>%d denies %s</title></circle>`, class,
			across(point.Limit), pictureHeight-height-6, point.Limit, percent(point.DeniedShare))
	}
	fmt.Fprintf(p, `<polyline points="%s"/>`, strings.Join(points, " "))
	p.label(0, "start", "limit 1")
	p.label(pictureWidth, "end", fmt.Sprintf("limit %d", last))
	return p.end()
}

// groupBar is a bar of the distribution of the keys.
type groupBar struct {
	KeyGroup

	Share float64 // of the length of the longest bar
}

// groupBars returns the distribution of the keys by how many requests they made, without empty groups at its begin. A
// bar has the keys with up to twice as many requests as the bar before. The lengths are logarithmic.
func groupBars(groups []KeyGroup) (bars []groupBar) {
	most := int64(1)
	for _, g := range groups {
		most = max(most, g.Keys)
	}
	for _, g := range groups {
		if g.Keys > 0 || len(bars) > 0 {
			bars = append(bars, groupBar{g, math.Log1p(float64(g.Keys)) / math.Log1p(float64(most))})
		}
	}
	return bars
}

// busiestSpan says in which span of time most requests came.
func busiestSpan(t Totals) string {
	most, seconds := int64(0), int64(0)
	for _, s := range t.Over {
		most, seconds = max(most, s.Allowed+s.Denied), s.Seconds
	}
	return fmt.Sprintf("at most %s in %d s", cli.Count(most, "request"), seconds)
}
