// Package svg has code for the charts and tables in docs/.
package svg

import "strconv"

// Left is the margin of a chart in pixels, and Gap the distance between two of its panels.
const (
	Left = 24
	Gap  = 16
)

// Head begins a chart. The colours are readable on white and on black. Text is lighter if the reader's system asks for
// a dark theme.
//
//nolint:lll // every chart has exactly this line
const Head = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{.Width}} {{.Height}}" width="{{.Width}}" height="{{.Height}}" role="img" aria-labelledby="title desc" font-family="sans-serif" font-size="13">
<title id="title">{{.Title}}</title>
<desc id="desc">{{.Description}}</desc>
<style>
	text { fill: #6e7681 }
	.strong { fill: #6e7681; font-weight: bold }
	.axis { stroke: #8b949e; stroke-width: 1 }
	@media (prefers-color-scheme: light) { text { fill: #57606a } .strong { fill: #24292f } }
	@media (prefers-color-scheme: dark) { text { fill: #9da7b1 } .strong { fill: #e6edf3 } }
</style>
<text class="strong" x="{{.Left}}" y="24" font-size="17">{{.Title}}</text>
<text x="{{.Left}}" y="44">{{.Description}}</text>
`

// Thousands formats 1234567 as 1,234,567.
func Thousands(n int) string {
	digits := strconv.Itoa(n)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}
