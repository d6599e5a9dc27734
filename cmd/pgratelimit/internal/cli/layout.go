package cli

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

const (
	PageWidth   = 80 // the width of output that is not for a terminal
	leastColumn = 24 // the minimum width of the last column of a table
	longestKey  = 40 // the maximum width of a key in a table; JSON has the whole key
)

// Short is like Printable, but leaves out the middle of a long text.
func Short(text string) string {
	runes := []rune(Printable(text))
	if len(runes) <= longestKey {
		return string(runes)
	}
	const left = longestKey / 2
	return string(runes[:left]) + "…" + string(runes[len(runes)-longestKey+left+1:])
}

// unbroken matches text that must stay on one line: a time, or text in backquotes to copy.
var unbroken = regexp.MustCompile("[0-9-]{10} [0-9:]{8}Z|`[^`]*`")

// wrap breaks a text at spaces into lines of at most width columns.
func wrap(text string, width int) (lines []string) {
	const held = "\x00"
	text = unbroken.ReplaceAllStringFunc(text, func(part string) string { return strings.ReplaceAll(part, " ", held) })
	for i, word := range strings.Split(text, " ") {
		last := len(lines) - 1
		if i == 0 || utf8.RuneCountInString(lines[last]+" "+word) > width {
			lines = append(lines, word)
		} else {
			lines[last] += " " + word
		}
	}
	for i := range lines {
		lines[i] = strings.ReplaceAll(lines[i], held, " ")
	}
	return lines
}

// Layout turns lines with tabs into columns. If the columns are too wide, Layout wraps the last column. If the table is
// still too wide and has headings, each row becomes a list. A width of 0 means no limit.
func Layout(text string, width int) string {
	var out strings.Builder
	var table [][]string
	for line := range strings.Lines(text + "\n") { // the empty last line ends the last table
		line = strings.TrimSuffix(line, "\n")
		if strings.Contains(line, "\t") {
			table = append(table, strings.Split(line, "\t"))
			continue
		}
		writeTable(&out, table, width)
		table = nil
		out.WriteString(line + "\n")
	}
	return strings.TrimSuffix(out.String(), "\n")
}

func writeTable(out *strings.Builder, rows [][]string, width int) {
	var widths []int // of all columns except the last
	for _, row := range rows {
		for i, cell := range row[:len(row)-1] {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(cell)+2)
		}
	}
	start := 0
	for _, w := range widths {
		start += w
	}
	headed := len(rows) > 1 && !slices.ContainsFunc(rows[0], func(cell string) bool {
		return cell != strings.ToUpper(cell)
	})
	tooWide := func(row []string) bool {
		return len(row) > len(widths) && start+utf8.RuneCountInString(row[len(row)-1]) > width
	}
	if headed && width > 0 && width-start < leastColumn && slices.ContainsFunc(rows, tooWide) {
		writeLists(out, rows, width)
		return
	}
	for _, row := range rows {
		at := 0
		for i, cell := range row[:len(row)-1] {
			fmt.Fprintf(out, "%-*s", widths[i], cell)
			at += widths[i]
		}
		last := []string{row[len(row)-1]}
		if width > 0 {
			last = wrap(last[0], max(width-at, leastColumn))
		}
		out.WriteString(strings.Join(last, "\n"+strings.Repeat(" ", at)) + "\n")
	}
}

// writeLists writes each row as a list of the cells that are not empty. The first row has the headings for the cells.
func writeLists(out *strings.Builder, rows [][]string, width int) {
	start := 0
	for _, heading := range rows[0] {
		start = max(start, utf8.RuneCountInString(heading)+2)
	}
	for i, row := range rows[1:] {
		if i > 0 {
			out.WriteString("\n")
		}
		for j, cell := range row {
			if cell != "" && j < len(rows[0]) {
				lines := wrap(cell, max(width-start, leastColumn))
				fmt.Fprintf(out, "%-*s%s\n", start, rows[0][j], strings.Join(lines, "\n"+strings.Repeat(" ", start)))
			}
		}
	}
}

// Help prints the help of a command. Help wraps paragraphs and the descriptions of flags.
func (a *App) Help(cmd *cobra.Command, _ []string) {
	columns := cmp.Or(width(a.Stdout), PageWidth)
	for paragraph := range strings.SplitSeq(strings.TrimSpace(cmp.Or(cmd.Long, cmd.Short)), "\n\n") {
		text := strings.Join(wrap(strings.ReplaceAll(paragraph, "\n", " "), columns), "\n")
		fmt.Fprint(a.Stdout, text+"\n\n")
	}
	cmd.SetUsageTemplate(strings.ReplaceAll(cmd.UsageTemplate(),
		".FlagUsages", fmt.Sprintf(".FlagUsagesWrapped %d", columns)))
	fmt.Fprint(a.Stdout, cmd.UsageString())
}
