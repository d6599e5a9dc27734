// Package replay decides requests of the past again, under other policies, by the rules of package model.
package replay

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// Input says how requests are read.
type Input struct {
	Files      []string // "-" is standard input
	Stdin      io.Reader
	Format     string // combined, json, csv, or "" to guess
	Time       string // the field of the time
	TimeLayout string // a layout of package time, or "" to guess
	Keys       []string
	Cost       string        // the field of the cost, or "" if each request costs 1
	Tolerance  int64         // by how many microseconds a line may be late
	MaxBad     float64       // the largest share of bad lines, and of late ones
	Progress   func(n int64) // gets the bytes that were read since the last call
}

// request is one line of the log.
type request struct {
	at   int64 // microseconds since 1970
	cost int64
	key  int32 // the key's number, in the order of the first requests
}

// BadLine is a line that could not be read.
type BadLine struct {
	File   string `json:"file"`
	Line   int64  `json:"line"`
	Reason string `json:"reason"` // never contains the line, which has personal data
}

// Lines says what was read.
type Lines struct {
	Format string    `json:"format"`
	Read   int64     `json:"read"`
	Bad    int64     `json:"bad"`
	First  []BadLine `json:"first_bad"` // the first few
	// Late is how many lines were later than the tolerance. They are decided at the time of the line before.
	Late int64 `json:"late"`
}

const (
	badShown    = 5
	longestLine = 1 << 20
	enoughLines = 1000 // from here on, a share of bad lines says something
)

// reader reads the requests of one file.
type reader struct {
	in     *Input
	name   string
	lines  *bufio.Reader
	close  func()
	format format
	number int64 // of the line
	values [][]byte
	joined []byte
	long   []byte
	ahead  request // the next request, if more is true
	more   bool
}

// counted calls progress with what was read.
type counted struct {
	io.Reader
	progress func(int64)
}

func (c counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.progress(int64(n))
	return n, err
}

// open opens a file, and finds out whether it is compressed.
func (in *Input) open(name string) (*reader, error) {
	r := &reader{in: in, name: name, close: func() {}}
	source := in.Stdin
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		source, r.close = file, func() { _ = file.Close() }
	}
	buffered := bufio.NewReaderSize(counted{source, in.Progress}, 1<<18)
	if magic, _ := buffered.Peek(2); string(magic) == "\x1f\x8b" {
		unzipped, err := gzip.NewReader(buffered)
		if err != nil {
			r.close()
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		buffered = bufio.NewReaderSize(unzipped, 1<<18)
	}
	if mark, _ := buffered.Peek(3); string(mark) == "\ufeff" { // Windows begins files so
		_, _ = buffered.Discard(3) // what was peeked can be discarded
	}
	r.lines = buffered
	return r, nil
}

// line returns the next line without its end, or io.EOF. A line that is too long is cut.
func (r *reader) line() ([]byte, error) {
	line, err := r.lines.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		r.long = append(r.long[:0], line...)
		for errors.Is(err, bufio.ErrBufferFull) {
			line, err = r.lines.ReadSlice('\n')
			if len(r.long) < longestLine {
				r.long = append(r.long, line...)
			}
		}
		line = r.long
	}
	if err != nil && (!errors.Is(err, io.EOF) || len(line) == 0) {
		return nil, err
	}
	r.number++
	return bytes.TrimRight(line, "\r\n"), nil
}

// guess returns the format that the beginning of a file has.
func (r *reader) guess() string {
	start, _ := r.lines.Peek(4096)
	line, _, _ := bytes.Cut(bytes.TrimLeft(start, " \t\r\n"), []byte("\n"))
	switch {
	case bytes.HasPrefix(line, []byte("{")):
		return "json"
	case bytes.Contains(line, []byte(" [")) && bytes.Contains(line, []byte(`] "`)):
		return "combined"
	case bytes.ContainsAny(line, ",;"):
		return "csv"
	}
	return ""
}

// start makes the format of a file.
func (r *reader) start(lines *Lines) error {
	name := r.in.Format
	if name == "" {
		if name = r.guess(); name == "" {
			if _, err := r.lines.Peek(1); errors.Is(err, io.EOF) {
				return nil // an empty file, as a rotation leaves
			}
			return fmt.Errorf("%s: its format cannot be guessed; --format says combined, json or csv", r.name)
		}
	}
	lines.Format = name
	names := append([]string{r.in.Time, r.in.Cost}, r.in.Keys...)
	r.values = make([][]byte, len(names))
	defaults := func(time string, keys ...string) {
		if names[0] == "" {
			names[0] = time
		}
		if len(r.in.Keys) == 0 {
			names = append(names[:2], keys...)
			r.values = make([][]byte, len(names))
		}
	}
	var err error
	switch name {
	case "combined", "common":
		defaults("time", "remote_addr")
		r.format, err = newAccessLog(names)
	case "json":
		defaults("time", "key")
		r.format = newJSON(names)
	case "csv":
		defaults("time", "key")
		if names[1] == "" {
			names[1] = "cost"
		}
		var header []byte
		for len(header) == 0 {
			if header, err = r.line(); err != nil {
				return fmt.Errorf("%s: it has no header: %w", r.name, err)
			}
		}
		r.format, err = newCSV(header, names, func(name string) bool { return name == "cost" && r.in.Cost == "" })
	default:
		err = fmt.Errorf("there is no format %q, but combined, json and csv", name)
	}
	return err
}

// next reads the next request into r.ahead. It counts bad lines.
func (r *reader) next(lines *Lines, keys *keyring) error {
	for r.format != nil {
		line, err := r.line()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
		if len(line) == 0 {
			continue
		}
		lines.Read++
		bad := r.request(line, keys)
		if bad == nil {
			r.more = true
			return nil
		}
		lines.Bad++
		if len(lines.First) < badShown {
			lines.First = append(lines.First, BadLine{r.name, r.number, bad.Error()})
		}
		if err := lines.check(r.in.MaxBad, enoughLines); err != nil {
			return err
		}
	}
	r.more = false
	r.close()
	return nil
}

var (
	errNoTime  = errors.New("the time is missing; --time names its field")
	errNoKey   = errors.New("the key is missing; --key names its field")
	errLongKey = errors.New("the key is longer than 512 bytes")
	errCost    = errors.New("the cost is not a whole number of at least 1")
)

// request reads one line.
func (r *reader) request(line []byte, keys *keyring) error {
	if err := r.format.fields(line, r.values); err != nil {
		return err
	}
	if r.values[0] == nil {
		return errNoTime
	}
	at, err := parseTime(r.values[0], r.in.TimeLayout)
	if err != nil {
		return err
	}
	key := r.values[2]
	if len(r.values) > 3 {
		r.joined = r.joined[:0]
		for i, part := range r.values[2:] {
			if i > 0 {
				r.joined = append(r.joined, ' ')
			}
			if part == nil {
				return errNoKey
			}
			r.joined = append(r.joined, part...)
		}
		key = r.joined
	}
	switch {
	case len(key) == 0:
		return errNoKey
	case len(key) > 512:
		return errLongKey
	}
	cost := int64(1)
	if text := r.values[1]; text != nil {
		if cost, err = strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64); err != nil || cost < 1 {
			return errCost
		}
	} else if r.in.Cost != "" {
		return errCost
	}
	r.ahead = request{at, cost, keys.of(key)}
	return nil
}

// check returns an error if there are too many bad or late lines, from a number of lines on.
func (l *Lines) check(share float64, from int64) error {
	most := share * float64(l.Read)
	switch {
	case l.Read < from:
		return nil
	case float64(l.Late) > most:
		return fmt.Errorf("%d of %d lines come later than --tolerance allows: sort the log by time, or raise "+
			"--tolerance, which takes memory; --max-bad allows more", l.Late, l.Read)
	case float64(l.Bad) <= most:
		return nil
	}
	texts := []string{fmt.Sprintf("%d of %d lines cannot be read", l.Bad, l.Read)}
	for _, bad := range l.First {
		texts = append(texts, fmt.Sprintf("%s line %d: %s", bad.File, bad.Line, bad.Reason))
	}
	return errors.New(strings.Join(append(texts, "--max-bad allows more"), "; "))
}

// each calls decide for each request, in the order of time. Requests of several files are merged.
func (in *Input) each(ctx context.Context, keys *keyring, decide func(request)) (lines Lines, err error) {
	lines.First = []BadLine{}
	var readers []*reader
	defer func() {
		for _, r := range readers {
			r.close()
		}
	}()
	for _, name := range in.Files {
		r, err := in.open(name)
		if err != nil {
			return lines, err
		}
		readers = append(readers, r)
		if err := r.start(&lines); err != nil {
			return lines, err
		}
		if err := r.next(&lines, keys); err != nil {
			return lines, err
		}
	}
	var waiting queue
	latest := int64(0) // the time of the last request that was decided
	pass := func(r request) {
		keys.waiting[r.key]--
		if r.at < latest {
			lines.Late++
			r.at = latest
		}
		latest = r.at
		decide(r)
	}
	for n := 0; ; n++ {
		var first *reader
		for _, r := range readers {
			if r.more && (first == nil || r.ahead.at < first.ahead.at) {
				first = r
			}
		}
		if first == nil {
			break
		}
		waiting.add(first.ahead)
		for waiting.length() > 0 && waiting.first().at < waiting.newest-in.Tolerance {
			pass(waiting.remove())
		}
		if err := first.next(&lines, keys); err != nil {
			return lines, err
		}
		if n%(1<<14) == 0 {
			if err := cmp.Or(ctx.Err(), lines.check(in.MaxBad, enoughLines)); err != nil {
				return lines, err
			}
		}
	}
	for waiting.length() > 0 {
		pass(waiting.remove())
	}
	return lines, lines.check(in.MaxBad, 0)
}

// queue has the requests of the last moments, as a heap. Requests of the same time keep their order.
type queue struct {
	requests []queued
	added    int64
	newest   int64 // the latest time
}

type queued struct {
	request

	order int64
}

func (q *queue) length() int     { return len(q.requests) }
func (q *queue) first() *request { return &q.requests[0].request }

func (q *queue) before(a, b *queued) bool { return a.at < b.at || a.at == b.at && a.order < b.order }

func (q *queue) add(r request) {
	q.added++
	q.newest = max(q.newest, r.at)
	q.requests = append(q.requests, queued{r, q.added})
	all := q.requests
	for i := len(all) - 1; i > 0; {
		parent := (i - 1) / 2
		if !q.before(&all[i], &all[parent]) {
			return
		}
		all[i], all[parent] = all[parent], all[i]
		i = parent
	}
}

func (q *queue) remove() request {
	first, last := q.requests[0].request, len(q.requests)-1
	q.requests[0] = q.requests[last]
	q.requests = q.requests[:last]
	all := q.requests
	for i := 0; ; {
		child := 2*i + 1
		if child+1 < last && q.before(&all[child+1], &all[child]) {
			child++
		}
		if child >= last || !q.before(&all[child], &all[i]) {
			return first
		}
		all[i], all[child] = all[child], all[i]
		i = child
	}
}
