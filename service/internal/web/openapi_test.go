package web

import (
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

type schema struct {
	Required   []string       `yaml:"required"`
	Properties map[string]any `yaml:"properties"`
}

type operation struct {
	RequestBody struct {
		Content map[string]content `yaml:"content"`
	} `yaml:"requestBody"`
	Responses map[string]struct {
		Ref     string             `yaml:"$ref"`
		Content map[string]content `yaml:"content"`
	} `yaml:"responses"`
}

type content struct {
	Schema struct {
		Ref string `yaml:"$ref"`
	} `yaml:"schema"`
}

func (c content) name() string { return strings.TrimPrefix(c.Schema.Ref, "#/components/schemas/") }

type specification struct {
	OpenAPI    string                          `yaml:"openapi"`
	Paths      map[string]map[string]operation `yaml:"paths"`
	Components struct {
		Schemas map[string]schema `yaml:"schemas"`
	} `yaml:"components"`
}

func readDocument(t testing.TB) specification {
	t.Helper()
	var s specification
	require.NoError(t, yaml.Unmarshal(openAPI, &s))
	return s
}

// checkDocumented checks the status and the fields of an answer against the document.
func checkDocumented(t testing.TB, path, method string, got reply) {
	t.Helper()
	s := readDocument(t)
	known, ok := s.Paths[path]
	if !ok {
		require.Equal(t, http.StatusNotFound, got.status)
		return
	}
	op, ok := known[strings.ToLower(method)]
	if !ok {
		require.Contains(t, []int{http.StatusMethodNotAllowed, http.StatusUnauthorized}, got.status)
		return
	}
	response, ok := op.Responses[strconv.Itoa(got.status)]
	require.True(t, ok, "%s: the document has no status %d", path, got.status)
	name := "problem"
	if response.Ref == "" {
		name = response.Content["application/json"].name()
	}
	for field := range got.body {
		require.Contains(t, s.Components.Schemas[name].Properties, field, path)
	}
	for _, field := range s.Components.Schemas[name].Required {
		require.Contains(t, got.body, field, path)
	}
}

// fieldsOf returns the names of a type's fields in JSON.
func fieldsOf(of reflect.Type) (names []string) {
	for field := range of.Fields() {
		if field.Anonymous {
			names = append(names, fieldsOf(field.Type)...)
			continue
		}
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		names = append(names, name)
	}
	return names
}

func TestOpenAPIDescribesTheHandlers(t *testing.T) {
	t.Parallel()
	s := readDocument(t)
	require.Equal(t, "3.1.0", s.OpenAPI)

	h, ok := New(Options{}).(*handler)
	require.True(t, ok)
	paths := slices.Sorted(maps.Keys(h.routes))
	require.Equal(t, append([]string{"/openapi.yaml"}, paths...), slices.Sorted(maps.Keys(s.Paths)))
	for _, path := range paths {
		require.Equal(t, []string{"post"}, slices.Collect(maps.Keys(s.Paths[path])), path)
	}

	types := map[string]reflect.Type{}
	for _, of := range []any{
		subject{}, askRequest{}, waitRequest{}, allRequest{}, refundRequest{}, chargeRequest{}, holdRequest{},
		cancelRequest{}, settleRequest{}, extendRequest{}, acquireRequest{}, renewRequest{}, releaseRequest{},
		decision{}, allAnswer{}, holdAnswer{}, balance{}, chargeAnswer{}, settlement{}, extended{},
		slotAnswer{}, renewed{}, released{}, problem{},
	} {
		types[reflect.TypeOf(of).Name()] = reflect.TypeOf(of)
	}
	require.Equal(t, slices.Sorted(maps.Keys(types)), slices.Sorted(maps.Keys(s.Components.Schemas)))
	for name, of := range types {
		fields := fieldsOf(of)
		require.ElementsMatch(t, fields, slices.Collect(maps.Keys(s.Components.Schemas[name].Properties)), name)
		require.Subset(t, fields, s.Components.Schemas[name].Required, name)
	}
}
