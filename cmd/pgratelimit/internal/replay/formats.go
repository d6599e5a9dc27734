package replay

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// A format finds the fields of a line. The fields are valid until the next line. A field that a line lacks is nil.
type format interface {
	// fields fills values with the fields that the format was made for.
	fields(line []byte, values [][]byte) error
}

var errShape = errors.New("the line does not have the format")

// accessLog is the common and the combined format of Apache and nginx. More may follow in a line.
type accessLog struct{ wanted []int }

// accessFields are the fields of an access log, by the names of nginx.
var accessFields = []string{
	"remote_addr", "ident", "remote_user", "time", "request", "status", "bytes", "referer", "user_agent",
	"method", "path",
}

const (
	accessAddr, accessTime, accessRequest, accessAgent, accessMethod = 0, 3, 4, 8, 9
)

func newAccessLog(names []string) (format, error) {
	f := accessLog{}
	for _, name := range names {
		i := slices.Index(accessFields, name)
		if i < 0 && name != "" {
			return nil, fmt.Errorf("%q is no field of an access log, which has %s",
				name, strings.Join(accessFields, ", "))
		}
		f.wanted = append(f.wanted, i)
	}
	return f, nil
}

func (f accessLog) fields(line []byte, values [][]byte) error {
	var all [9][]byte
	// A user name may contain spaces, so the time is what begins with the first bracket after the address.
	space := bytes.IndexByte(line, ' ')
	open := bytes.Index(line, []byte(" ["))
	if space <= 0 || open < space {
		return errShape
	}
	end := bytes.IndexByte(line[open:], ']')
	if end < 0 {
		return errShape
	}
	all[accessAddr], all[accessTime] = line[:space], line[open+2:open+end]
	all[1], all[2], _ = bytes.Cut(line[min(space+1, open):open], []byte(" "))
	rest := line[open+end+1:]
	if !bytes.HasPrefix(rest, []byte(` "`)) {
		return errShape
	}
	if slices.Max(f.wanted) > accessTime {
		for i := accessRequest; i <= accessAgent; i++ {
			if all[i], rest = nextWord(rest); rest == nil {
				break
			}
		}
	}
	for i, want := range f.wanted {
		switch {
		case want < 0:
			values[i] = nil
		case want < accessMethod:
			values[i] = all[want]
		default:
			words := bytes.SplitN(all[accessRequest], []byte(" "), 3)
			if values[i] = nil; len(words) > want-accessMethod {
				values[i], _, _ = bytes.Cut(words[want-accessMethod], []byte("?"))
			}
		}
	}
	return nil
}

// nextWord returns the next word of a line, which may be in quotation marks, and what follows it. rest is nil at the
// end of the line.
func nextWord(line []byte) (word, rest []byte) {
	line = bytes.TrimLeft(line, " ")
	if len(line) == 0 {
		return nil, nil
	}
	if line[0] != '"' {
		i := bytes.IndexByte(line, ' ')
		if i < 0 {
			return line, nil
		}
		return line[:i], line[i:]
	}
	for i := 1; i < len(line); i++ {
		switch line[i] {
		case '\\':
			i++
		case '"':
			return line[1:i], line[i+1:]
		}
	}
	return line[1:], nil
}

// csvFile is CSV with a header, one record a line.
type csvFile struct {
	columns []int
	comma   byte
	scratch []byte
}

// newCSV returns the format of a file with this header. Missing columns of the names that are optional are ignored.
func newCSV(header []byte, names []string, optional func(name string) bool) (format, error) {
	f := &csvFile{comma: ','}
	if !bytes.Contains(header, []byte(",")) && bytes.Contains(header, []byte(";")) {
		f.comma = ';'
	}
	var titles []string
	for rest := header; rest != nil; {
		var title []byte
		var err error
		if title, rest, err = f.next(rest); err != nil {
			return nil, fmt.Errorf("the header of the CSV: %w", err)
		}
		titles = append(titles, strings.TrimSpace(string(title)))
	}
	for _, name := range names {
		i := slices.Index(titles, name)
		if i < 0 && !optional(name) {
			return nil, fmt.Errorf("the CSV has no column %q, but %q", name, titles)
		}
		f.columns = append(f.columns, i)
	}
	return f, nil
}

func (f *csvFile) fields(line []byte, values [][]byte) error {
	clear(values)
	f.scratch = f.scratch[:0]
	last := slices.Max(f.columns)
	rest := line
	for column := 0; column <= last; column++ {
		if rest == nil {
			return errShape
		}
		var value []byte
		var err error
		if value, rest, err = f.next(rest); err != nil {
			return err
		}
		for i, wanted := range f.columns {
			if wanted == column {
				values[i] = value
			}
		}
	}
	return nil
}

// next returns the next value of a record, and what follows it. rest is nil after the last value.
func (f *csvFile) next(line []byte) (value, rest []byte, err error) {
	if len(line) == 0 || line[0] != '"' {
		value, rest, _ = bytes.Cut(line, []byte{f.comma})
		return value, rest, nil
	}
	start := len(f.scratch)
	for i := 1; i < len(line); i++ {
		if line[i] != '"' {
			f.scratch = append(f.scratch, line[i])
			continue
		}
		if i+1 < len(line) && line[i+1] == '"' {
			f.scratch = append(f.scratch, '"')
			i++
			continue
		}
		if rest = line[i+1:]; len(rest) > 0 && rest[0] != f.comma {
			return nil, nil, errShape
		}
		if len(rest) > 0 {
			return f.scratch[start:], rest[1:], nil
		}
		return f.scratch[start:], nil, nil
	}
	return nil, nil, errShape // the quotation mark is open, and records of several lines are not read
}

// jsonLines has one JSON object a line.
type jsonLines struct {
	paths   [][]string
	scratch []byte
}

// newJSON returns a format with paths such as $.user.id, or user.id. Here $.list.0 is the first element of a list.
func newJSON(names []string) format {
	f := &jsonLines{}
	for _, name := range names {
		if name == "" {
			f.paths = append(f.paths, nil)
			continue
		}
		f.paths = append(f.paths, strings.Split(strings.TrimPrefix(name, "$."), "."))
	}
	return f
}

func (f *jsonLines) fields(line []byte, values [][]byte) error {
	clear(values)
	f.scratch = f.scratch[:0]
	if line = trimSpace(line); len(line) == 0 || line[0] != '{' {
		return errShape
	}
	for i, path := range f.paths {
		if path == nil {
			continue
		}
		value, err := f.find(line, path)
		if err != nil {
			return err
		}
		if len(value) > 0 && value[0] == '"' {
			if value, err = f.unquote(value); err != nil {
				return err
			}
		} else if string(value) == "null" {
			value = nil
		}
		values[i] = value
	}
	return nil
}

func trimSpace(text []byte) []byte {
	for len(text) > 0 && (text[0] == ' ' || text[0] == '\t') {
		text = text[1:]
	}
	return text
}

// find returns the text of the value at a path, or nil if there is none.
func (f *jsonLines) find(value []byte, path []string) ([]byte, error) {
	if len(path) == 0 {
		end, err := skipValue(value)
		return value[:end], err
	}
	if len(value) == 0 || value[0] != '{' && value[0] != '[' {
		return nil, nil
	}
	object := value[0] == '{'
	for rest, n := trimSpace(value[1:]), 0; ; n++ {
		if len(rest) == 0 {
			return nil, errShape
		}
		if rest[0] == '}' || rest[0] == ']' {
			return nil, nil
		}
		found := !object && path[0] == strconv.Itoa(n)
		if object {
			end, err := skipValue(rest)
			if err != nil || rest[0] != '"' {
				return nil, errShape
			}
			name := rest[1 : end-1]
			if bytes.IndexByte(name, '\\') >= 0 {
				if name, err = f.unquote(rest[:end]); err != nil {
					return nil, err
				}
			}
			found = string(name) == path[0]
			var ok bool
			if rest, ok = take(trimSpace(rest[end:]), ":"); !ok {
				return nil, errShape
			}
			rest = trimSpace(rest)
		}
		if found {
			return f.find(rest, path[1:])
		}
		end, err := skipValue(rest)
		if err != nil {
			return nil, err
		}
		if rest = trimSpace(rest[end:]); len(rest) > 0 && rest[0] == ',' {
			rest = trimSpace(rest[1:])
		}
	}
}

// skipValue returns the length of the JSON value at the start of text.
func skipValue(text []byte) (int, error) {
	depth := 0
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '"':
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
			if i >= len(text) {
				return 0, errShape
			}
			if depth == 0 {
				return i + 1, nil
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return i, nil
			}
			if depth--; depth == 0 {
				return i + 1, nil
			}
		case ',', ' ', '\t':
			if depth == 0 {
				if i == 0 {
					return 0, errShape
				}
				return i, nil
			}
		}
	}
	if depth > 0 || len(text) == 0 {
		return 0, errShape
	}
	return len(text), nil
}

// unquote returns the text of a JSON string.
func (f *jsonLines) unquote(quoted []byte) ([]byte, error) {
	inner := quoted[1 : len(quoted)-1]
	if bytes.IndexByte(inner, '\\') < 0 {
		return inner, nil
	}
	start := len(f.scratch)
	for i := 0; i < len(inner); i++ {
		if inner[i] != '\\' {
			f.scratch = append(f.scratch, inner[i])
			continue
		}
		if i++; i >= len(inner) {
			return nil, errShape
		}
		if at := strings.IndexByte(`"\/bfnrt`, inner[i]); at >= 0 {
			f.scratch = append(f.scratch, "\"\\/\b\f\n\r\t"[at])
			continue
		}
		unit, ok := hexUnit(inner[i:])
		if !ok {
			return nil, errShape
		}
		i += 4
		if utf16.IsSurrogate(unit) {
			low, ok := rune(0), false
			if i+1 < len(inner) && inner[i+1] == '\\' {
				low, ok = hexUnit(inner[i+2:])
			}
			if unit = utf16.DecodeRune(unit, low); ok && unit != utf8.RuneError {
				i += 6
			}
		}
		f.scratch = utf8.AppendRune(f.scratch, unit)
	}
	return f.scratch[start:], nil
}

// hexUnit reads a text such as u00e9.
func hexUnit(text []byte) (rune, bool) {
	if len(text) < 5 || text[0] != 'u' {
		return 0, false
	}
	n, err := strconv.ParseUint(string(text[1:5]), 16, 16)
	return rune(n), err == nil
}
