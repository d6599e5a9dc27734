// Package settings reads the configuration directory of the service.
package settings

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/service/internal/envoy"
)

// maxFile is the size that a file may have, in bytes.
const maxFile = 16 << 20

// Settings are what the files of a directory say.
type Settings struct {
	Limiters map[string]Limiter // by name
	Envoy    *envoy.Config
}

// Limiter is a limiter of a file.
type Limiter struct {
	Name              string
	Policy            ratelimit.Policy
	Durable           bool
	SynchronousCommit bool
	OnFailure         *ratelimit.FailureMode // nil if the file does not say
	File              string
	Line              int // where it is in the file
}

// Error says what is wrong in a file, and how to mend it.
type Error struct {
	File   string
	Line   int // from 1; 0 if the reason is about the whole file
	Reason string
}

func (e *Error) Error() string {
	if e.Line == 0 {
		return e.File + ": " + e.Reason
	}
	return fmt.Sprintf("%s:%d: %s", e.File, e.Line, e.Reason)
}

// Read reads the files of a directory whose names end in .yaml or .yml. It leaves out hidden files and folders, such as
// those that Kubernetes makes beside the files of a ConfigMap.
func Read(dir string) (map[string][]byte, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	files := make(map[string][]byte)
	for _, entry := range entries {
		name := entry.Name()
		if ext := filepath.Ext(name); strings.HasPrefix(name, ".") || ext != ".yaml" && ext != ".yml" {
			continue
		}
		path := filepath.Join(dir, name)
		info, err := os.Stat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist): // a file that was just deleted, or a link to nothing
			continue
		case err != nil:
			return nil, err
		case info.IsDir():
			continue
		case !info.Mode().IsRegular():
			return nil, &Error{File: name, Reason: "is no ordinary file"}
		case info.Size() > maxFile:
			reason := fmt.Sprintf("has %d bytes; a file may have %d", info.Size(), maxFile)
			return nil, &Error{File: name, Reason: reason}
		}
		if files[name], err = os.ReadFile(path); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// Load returns what the files say. The error joins what is wrong in each file.
func Load(files map[string][]byte) (*Settings, error) {
	s := &Settings{Limiters: make(map[string]Limiter)}
	at := make(map[string]string) // the place of each limiter
	domains := make(map[string][]byte)
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(files)) {
		list := limitersOf(files[name])
		if list == nil {
			domains[name] = files[name]
			continue
		}
		if err := s.read(name, list, at); err != nil {
			errs = append(errs, err)
		}
	}
	var err error
	if s.Envoy, err = envoy.Load(domains); err != nil {
		errs = append(errs, err)
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return s, nil
}

// limitersOf returns the root of a file that has the field limiters, or nil.
func limitersOf(content []byte) *yaml.Node {
	var document yaml.Node
	if yaml.Unmarshal(content, &document) != nil || len(document.Content) != 1 {
		return nil // package envoy says what is wrong
	}
	root := document.Content[0]
	if field(root, "limiters") == nil {
		return nil
	}
	return root
}

// field returns the value of a field of a mapping, or nil.
func field(n *yaml.Node, name string) *yaml.Node {
	if n.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == name {
				return n.Content[i+1]
			}
		}
	}
	return nil
}

func (s *Settings) read(file string, root *yaml.Node, at map[string]string) error {
	fail := func(n *yaml.Node, format string, args ...any) error {
		return &Error{File: file, Line: n.Line, Reason: fmt.Sprintf(format, args...)}
	}
	if err := onlyFields(root, "limiters"); err != nil {
		return fail(root, "%v; put a domain of Envoy's into a file of its own", err)
	}
	list := field(root, "limiters")
	if list.Kind != yaml.SequenceNode {
		return fail(list, "limiters has to be a list: lines that begin with - name:")
	}
	for _, n := range list.Content {
		if n.Kind == yaml.AliasNode {
			n = n.Alias
		}
		l, err := read(n)
		if err != nil {
			return fail(n, "%v", err)
		}
		if before, twice := at[l.Name]; twice {
			return fail(n, "there is a limiter %q already, in %s; remove one, or give it another name", l.Name, before)
		}
		at[l.Name] = file + ":" + strconv.Itoa(n.Line)
		l.File, l.Line = file, n.Line
		s.Limiters[l.Name] = l
	}
	return nil
}

func read(n *yaml.Node) (Limiter, error) {
	if n.Kind != yaml.MappingNode {
		return Limiter{}, errors.New("a limiter has to be a mapping: lines of the form name: value")
	}
	err := onlyFields(n, "name", "policy", "durable", "synchronous_commit", "on_failure")
	if err != nil {
		return Limiter{}, err
	}
	var raw struct {
		Name              string
		Policy            string
		Durable           bool
		SynchronousCommit bool   `yaml:"synchronous_commit"`
		OnFailure         string `yaml:"on_failure"`
	}
	if err := n.Decode(&raw); err != nil {
		text := strings.TrimPrefix(err.Error(), "yaml: unmarshal errors:\n  ")
		return Limiter{}, errors.New(text)
	}
	l := Limiter{Name: raw.Name, Durable: raw.Durable, SynchronousCommit: raw.SynchronousCommit}
	switch {
	case raw.Name == "":
		return Limiter{}, errors.New("the limiter has no name; write name: login")
	case raw.Policy == "":
		return Limiter{}, errors.New("the limiter has no policy; write policy: sliding 10/1m")
	}
	if l.Policy, err = ratelimit.ParsePolicy(raw.Policy); err != nil {
		return Limiter{}, err
	}
	if raw.OnFailure != "" {
		mode, err := ParseFailureMode(raw.OnFailure)
		if err != nil {
			return Limiter{}, err
		}
		l.OnFailure = &mode
	}
	return l, nil
}

// onlyFields returns an error for a field that is not known, and for one that is there twice.
func onlyFields(n *yaml.Node, known ...string) error {
	seen := make(map[string]bool)
	for i := 0; i+1 < len(n.Content); i += 2 {
		name := n.Content[i]
		switch {
		case !slices.Contains(known, name.Value):
			return fmt.Errorf("line %d has an unknown field %q; the fields are %s",
				name.Line, name.Value, strings.Join(known, ", "))
		case seen[name.Value]:
			return fmt.Errorf("line %d has the field %s once more", name.Line, name.Value)
		}
		seen[name.Value] = true
	}
	return nil
}

// ParseFailureMode reads error, allow, deny or local SHARE.
func ParseFailureMode(text string) (ratelimit.FailureMode, error) {
	word, share, _ := strings.Cut(text, " ")
	switch {
	case text == "error":
		return ratelimit.ReturnError(), nil
	case text == "allow":
		return ratelimit.FailOpen(), nil
	case text == "deny":
		return ratelimit.FailClosed(), nil
	case word == "local":
		if n, err := strconv.ParseFloat(share, 64); err == nil && n > 0 && n <= 1 {
			return ratelimit.FallbackLocal(n), nil
		}
	}
	return ratelimit.FailureMode{}, fmt.Errorf(
		`%q is no answer while Postgres is away; write error, allow, deny, or local 0.5 for half of the limit`, text)
}
