package envoy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

const (
	maxFile  = 16 << 20  // the size of a file, in bytes
	maxNodes = 1_000_000 // the parts of a file; without a bound, a short file with aliases could have any number
	maxDepth = 64        // rules within rules, and values within metadata

	maxLimiterName = 128 // bytes; see ratelimit.Config
)

// Load reads files of Envoy's reference service, and returns their rules. The map has the content of each file by its
// name. The error joins a ConfigError for each file that is wrong. Then there is no Config.
func Load(files map[string][]byte) (*Config, error) {
	config := &Config{domains: map[string]*domain{}}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := config.load(name, files[name]); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return config, nil
}

func (c *Config) load(file string, content []byte) error {
	r := &reader{file: file}
	d, err := r.read(content)
	if err != nil {
		return err
	}
	if other := c.domains[d.name]; other != nil {
		return r.errorAt(0, "has the domain %q, as %s does; put all rules of a domain in one file", d.name, other.file)
	}
	c.domains[d.name] = d
	return nil
}

// reader reads one file.
type reader struct {
	file  string
	nodes int // how many parts it has read
}

func (r *reader) errorAt(line int, format string, args ...any) error {
	return &ConfigError{File: r.file, Line: line, Reason: fmt.Sprintf(format, args...)}
}

func (r *reader) read(content []byte) (*domain, error) {
	if len(content) > maxFile {
		return nil, r.errorAt(0, "has %d bytes; a file may have %d", len(content), maxFile)
	}
	decoder := yaml.NewDecoder(bytes.NewReader(content))
	var document, second yaml.Node
	if err := decoder.Decode(&document); err != nil && !errors.Is(err, io.EOF) {
		return nil, r.syntaxError(err)
	}
	if err := decoder.Decode(&second); err == nil {
		return nil, r.errorAt(second.Line, "a second document begins here; put each domain in a file of its own")
	} else if !errors.Is(err, io.EOF) {
		return nil, r.syntaxError(err)
	}
	if document.Kind == 0 || len(document.Content) == 0 {
		return nil, r.errorAt(0, "is empty; a file needs a domain and descriptors")
	}
	root, err := r.fields(document.Content[0], "a file", "domain", "descriptors")
	if err != nil {
		return nil, err
	}
	d := &domain{file: r.file}
	if d.name, err = r.text(root["domain"]); err != nil {
		return nil, err
	}
	switch line := root["domain"].line(document.Content[0]); {
	case d.name == "":
		return nil, r.errorAt(line, "there is no domain; write the domain that Envoy sends, such as: domain: shop")
	case strings.ContainsRune(d.name, 0):
		return nil, r.errorAt(line, "the domain has a NUL character, which Postgres cannot store")
	case len(limiterName(d.name)) > maxLimiterName:
		return nil, r.errorAt(line, "the domain has %d bytes; it may have %d",
			len(d.name), maxLimiterName-len(limiterName("")))
	}
	return d, r.rules(&d.rules, d.name+".", root["descriptors"], 1)
}

// syntaxError returns an error with the line that the YAML library has put in its text.
func (r *reader) syntaxError(err error) error {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	if rest, found := strings.CutPrefix(text, "line "); found {
		number, reason, _ := strings.Cut(rest, ": ")
		if line, err := strconv.Atoi(number); err == nil {
			return r.errorAt(line, "is not YAML: %s", reason)
		}
	}
	return r.errorAt(0, "is not YAML: %s", text)
}

// field is a field's value, and the line of its name.
type field struct {
	value *yaml.Node
	at    int
}

// line returns the line of the field, or the line of the mapping if there is no such field.
func (f *field) line(mapping *yaml.Node) int {
	if f == nil {
		return mapping.Line
	}
	return f.at
}

// fields returns the fields of a mapping by their names, and refuses those that are not known. A field that is null is
// left out.
func (r *reader) fields(n *yaml.Node, what string, known ...string) (map[string]*field, error) {
	all := map[string]*field{}
	if err := r.merge(all, n, what, 1); err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if !slices.Contains(known, name) {
			return nil, r.errorAt(all[name].at, "%s has no field %s; its fields are %s",
				what, quoted(name), strings.Join(known, ", "))
		}
		if all[name].value.Kind == yaml.ScalarNode && all[name].value.ShortTag() == "!!null" {
			delete(all, name)
		}
	}
	return all, nil
}

// merge adds the fields of a mapping. Those of a merge key (<<) come last, because the mapping's own have precedence.
func (r *reader) merge(all map[string]*field, n *yaml.Node, what string, depth int) error {
	n, err := r.follow(n)
	if err != nil {
		return err
	}
	if n.Kind != yaml.MappingNode || depth > maxDepth {
		return r.errorAt(n.Line, "%s has to be a mapping: lines of the form name: value", what)
	}
	own := map[string]int{}
	var merged []*yaml.Node
	for i := 0; i+1 < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		if name.ShortTag() == "!!merge" {
			merged = append(merged, value)
			continue
		}
		if name.Kind != yaml.ScalarNode {
			return r.errorAt(name.Line, "the name of a field has to be text")
		}
		if line, twice := own[name.Value]; twice {
			return r.errorAt(name.Line, "%s is already in line %d", quoted(name.Value), line)
		}
		own[name.Value] = name.Line
		if all[name.Value] == nil {
			if value, err = r.follow(value); err != nil {
				return err
			}
			all[name.Value] = &field{value: value, at: name.Line}
		}
	}
	for _, from := range merged {
		from, err := r.follow(from)
		if err != nil {
			return err
		}
		sources := []*yaml.Node{from}
		if from.Kind == yaml.SequenceNode {
			sources = from.Content
		}
		for _, source := range sources {
			if err := r.merge(all, source, what, depth+1); err != nil {
				return err
			}
		}
	}
	return nil
}

// follow returns what an alias stands for, or n. It counts what the reader has read.
func (r *reader) follow(n *yaml.Node) (*yaml.Node, error) {
	r.nodes++
	for range maxDepth {
		if n.Kind != yaml.AliasNode {
			break
		}
		n = n.Alias
	}
	if r.nodes > maxNodes || n.Kind == yaml.AliasNode {
		return nil, r.errorAt(n.Line, "the file is too large, counting what its aliases stand for")
	}
	return n, nil
}

// rules adds the rules of a list to a level. before is the beginning of their names in the statistics.
func (r *reader) rules(to *level, before string, list *field, depth int) error {
	if list == nil {
		return nil
	}
	if list.value.Kind != yaml.SequenceNode {
		return r.errorAt(list.at, "descriptors has to be a list: lines that begin with - key:")
	}
	if depth > maxDepth {
		return r.errorAt(list.at, "there are more than %d rules within each other", maxDepth)
	}
	for _, n := range list.value.Content {
		if err := r.rule(to, before, n, depth); err != nil {
			return err
		}
	}
	return nil
}

func (r *reader) rule(to *level, before string, n *yaml.Node, depth int) error {
	n, err := r.follow(n)
	if err != nil {
		return err
	}
	f, err := r.fields(n, "a descriptor", "key", "value", "rate_limit", "descriptors", "shadow_mode", "quota_mode",
		"detailed_metric", "value_to_metric", "share_threshold", "metadata")
	if err != nil {
		return err
	}
	made := &rule{line: n.Line}
	if made.name, err = r.text(f["key"]); err != nil {
		return err
	}
	if made.name == "" {
		return r.errorAt(f["key"].line(n), "the descriptor has no key; write the key of Envoy's descriptor entry")
	}
	value, err := r.text(f["value"])
	if err != nil {
		return err
	}
	if value != "" {
		made.name += "_" + value
	}
	made.statName = before + made.name
	if other := to.byName[made.name]; other != nil {
		return r.errorAt(n.Line, "the descriptor %s is already in line %d; join the two", quoted(made.name), other.line)
	}
	var shadow, quota, detailed bool
	for _, flag := range []struct {
		name string
		to   *bool
	}{
		{"shadow_mode", &shadow}, {"quota_mode", &quota}, {"detailed_metric", &detailed},
		{"value_to_metric", &made.valueToMetric}, {"share_threshold", &made.shareThreshold},
	} {
		if *flag.to, err = r.boolean(f[flag.name], flag.name); err != nil {
			return err
		}
	}
	if made.shareThreshold && !strings.Contains(made.name, "*") {
		return r.errorAt(f["share_threshold"].at,
			"share_threshold needs a wildcard: a * in the value, such as /files/*; remove one or add the other")
	}
	metadata, err := r.metadata(f["metadata"])
	if err != nil {
		return err
	}
	if f["rate_limit"] != nil {
		if made.limit, err = r.limit(f["rate_limit"].value); err != nil {
			return err
		}
		made.limit.shadow, made.limit.quota, made.limit.detailedMetric = shadow, quota, detailed
		made.limit.metadata = metadata
	}
	to.add(made)
	return r.rules(&made.below, made.statName+".", f["descriptors"], depth+1)
}

const units = "second, minute, hour, day, week, month or year"

func (r *reader) limit(n *yaml.Node) (*limit, error) {
	f, err := r.fields(n, "rate_limit", "unit", "requests_per_unit", "unlimited", "name", "replaces")
	if err != nil {
		return nil, err
	}
	made := &limit{}
	if made.name, err = r.text(f["name"]); err != nil {
		return nil, err
	}
	if made.unlimited, err = r.boolean(f["unlimited"], "unlimited"); err != nil {
		return nil, err
	}
	if made.perUnit, err = r.number(f["requests_per_unit"]); err != nil {
		return nil, err
	}
	unit, err := r.text(f["unit"])
	if err != nil {
		return nil, err
	}
	made.unit = pb.RateLimitResponse_RateLimit_Unit(pb.RateLimitResponse_RateLimit_Unit_value[strings.ToUpper(unit)])
	switch line := f["unit"].line(n); {
	case made.unlimited && unit != "":
		return nil, r.errorAt(line, "an unlimited rate_limit has no unit; remove unit or unlimited")
	case made.unlimited:
	case unit == "":
		return nil, r.errorAt(line, "rate_limit has no unit; write %s", units)
	case seconds(made.unit) == 0:
		return nil, r.errorAt(line, "there is no unit %s; write %s", quoted(unit), units)
	}
	made.replaces, err = r.replaces(f["replaces"], made.name)
	return made, err
}

// replaces returns the names in the list of the limits that a limit with this name replaces.
func (r *reader) replaces(list *field, name string) (names []string, err error) {
	if list == nil {
		return nil, nil
	}
	if list.value.Kind != yaml.SequenceNode {
		return nil, r.errorAt(list.at, "replaces has to be a list: - name: the name of another rate_limit")
	}
	for _, n := range list.value.Content {
		f, err := r.fields(n, "an entry of replaces", "name")
		if err != nil {
			return nil, err
		}
		replaced, err := r.text(f["name"])
		if err != nil {
			return nil, err
		}
		switch replaced {
		case "":
			return nil, r.errorAt(n.Line, "an entry of replaces needs the name of another rate_limit")
		case name:
			return nil, r.errorAt(n.Line, "rate_limit %s replaces itself; name another one", quoted(name))
		}
		names = append(names, replaced)
	}
	return names, nil
}

// text returns the text of a scalar as it is in the file, so that a value of 404 needs no quotes. It returns "" for a
// field that is missing.
func (r *reader) text(f *field) (string, error) {
	switch {
	case f == nil:
		return "", nil
	case f.value.Kind != yaml.ScalarNode:
		return "", r.errorAt(f.at, "has to be text, not a list or a mapping")
	case !utf8.ValidString(f.value.Value):
		return "", r.errorAt(f.at, "has to be UTF-8, as Envoy's descriptors are")
	}
	return f.value.Value, nil
}

func (r *reader) boolean(f *field, name string) (is bool, err error) {
	if f == nil {
		return false, nil
	}
	if f.value.Kind != yaml.ScalarNode || f.value.Decode(&is) != nil {
		return false, r.errorAt(f.at, "%s has to be true or false", name)
	}
	return is, nil
}

func (r *reader) number(f *field) (n uint32, err error) {
	if f == nil {
		return 0, nil
	}
	if f.value.Kind != yaml.ScalarNode || f.value.ShortTag() != "!!int" || f.value.Decode(&n) != nil {
		return 0, r.errorAt(f.at, "requests_per_unit has to be a whole number from 0 to 4294967295")
	}
	return n, nil
}

// metadata returns the value of a field of metadata, or nil.
func (r *reader) metadata(f *field) (*structpb.Struct, error) {
	if f == nil {
		return nil, nil
	}
	if f.value.Kind != yaml.MappingNode {
		return nil, r.errorAt(f.at, "metadata has to be a mapping: lines of the form name: value")
	}
	value, err := r.value(f.value, 1)
	if err != nil || len(value.GetStructValue().GetFields()) == 0 {
		return nil, err
	}
	return value.GetStructValue(), nil
}

func (r *reader) value(n *yaml.Node, depth int) (*structpb.Value, error) {
	n, err := r.follow(n)
	if err != nil {
		return nil, err
	}
	if depth > maxDepth {
		return nil, r.errorAt(n.Line, "the metadata has more than %d values within each other", maxDepth)
	}
	switch n.Kind {
	case yaml.MappingNode:
		all := map[string]*field{}
		if err := r.merge(all, n, "metadata", depth); err != nil {
			return nil, err
		}
		made := &structpb.Struct{Fields: map[string]*structpb.Value{}}
		for name, f := range all {
			if made.Fields[name], err = r.value(f.value, depth+1); err != nil {
				return nil, err
			}
		}
		return structpb.NewStructValue(made), nil
	case yaml.SequenceNode:
		made := &structpb.ListValue{}
		for _, element := range n.Content {
			value, err := r.value(element, depth+1)
			if err != nil {
				return nil, err
			}
			made.Values = append(made.Values, value)
		}
		return structpb.NewListValue(made), nil
	}
	var plain any
	if err := n.Decode(&plain); err != nil {
		return nil, r.errorAt(n.Line, "the metadata has a value that cannot be read")
	}
	made, err := structpb.NewValue(plain)
	if err != nil {
		return nil, r.errorAt(n.Line, "the metadata has a value that is no text, number or boolean; put it in quotes")
	}
	return made, nil
}

// quoted returns a text for an error, cut off if it is long.
func quoted(text string) string {
	if short := []rune(text); len(short) > 60 {
		text = string(short[:60]) + "…"
	}
	return strconv.Quote(text)
}
