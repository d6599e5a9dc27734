package web

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strconv"
	"strings"
)

// noSuchField returns the mistake of a field that a request does not have.
func noSuchField(request any) string {
	return "There is no such field; the fields are " + listFields(reflect.TypeOf(request).Elem()) + "."
}

// listFields returns the names of a struct's fields in JSON. A field that is a list is followed by the fields of its
// elements.
func listFields(of reflect.Type) string {
	var names []string
	for field := range of.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		switch {
		case field.Anonymous:
			name = listFields(field.Type)
		case field.Type.Kind() == reflect.Slice:
			name += " (each with " + listFields(field.Type.Elem()) + ")"
		}
		names = append(names, name)
	}
	return strings.Join(names, ", ")
}

// checkText looks for mistakes that encoding/json lets pass: a name in another case, a name that an object has twice,
// and half of a surrogate pair, which it replaces, so that different keys would count as one. It returns the field and
// the mistake, or "". The body must be valid JSON, and have been decoded into request.
func checkText(body []byte, request any) (field, mistake string) {
	var names []map[string]bool // of each object and list that is open
	for i := 0; i < len(body); i++ {
		switch body[i] {
		case '{', '[':
			names = append(names, map[string]bool{})
		case '}', ']':
			names = names[:len(names)-1]
		case '"':
			text := firstText(body[i:])
			i += len(text) - 1
			if hasHalfPair(text) {
				return field, `It has half of a surrogate pair, \ud800 to \udfff, which is no character.`
			}
			if rest := bytes.TrimLeft(body[i+1:], " \t\r\n"); !bytes.HasPrefix(rest, []byte(":")) {
				continue // it is a value
			}
			_ = json.Unmarshal(text, &field)
			if strings.Trim(field, "abcdefghijklmnopqrstuvwxyz_") != "" {
				return field, noSuchField(request)
			}
			open := names[len(names)-1]
			if open[field] {
				return field, "It is there twice."
			}
			open[field] = true
		}
	}
	return "", ""
}

// firstText returns the text at the beginning of JSON, with its quotes.
func firstText(body []byte) []byte {
	i := 1
	for body[i] != '"' {
		if body[i] == '\\' {
			i++
		}
		i++
	}
	return body[:i+1]
}

// hasHalfPair returns whether a text in JSON has an escape such as \ud800 without its other half.
func hasHalfPair(text []byte) bool {
	for i := 0; i < len(text); i++ {
		if text[i] != '\\' {
			continue
		}
		switch first := escape(text[i:]); {
		case first < 0xd800 || first > 0xdfff:
			i++
		case first <= 0xdbff && escape(text[i+6:]) >= 0xdc00 && escape(text[i+6:]) <= 0xdfff:
			i += 11
		default:
			return true
		}
	}
	return false
}

// escape returns the number of an escape such as \u0041 at the beginning of a text, or 0.
func escape(text []byte) uint64 {
	if len(text) < 6 || text[0] != '\\' || text[1] != 'u' {
		return 0
	}
	n, _ := strconv.ParseUint(string(text[2:6]), 16, 32)
	return n
}
