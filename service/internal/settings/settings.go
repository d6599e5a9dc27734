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

func errorAt(file string, n *yaml.Node, format string, args ...any) error {
	return &Error{File: file, Line: n.Line, Reason: fmt.Sprintf(format, args...)}
}

func (s *Settings) read(file string, root *yaml.Node, at map[string]string) error {
	if name, reason := wrongField(root, "limiters"); name != nil {
		return errorAt(file, name, "%s; put a domain of Envoy's into a file of its own", reason)
	}
	list := field(root, "limiters")
	if list.Kind != yaml.SequenceNode {
		return errorAt(file, list, "limiters has to be a list: lines that begin with - name:")
	}
	for _, n := range list.Content {
		if n.Kind == yaml.AliasNode {
			n = n.Alias
		}
		l, err := read(file, n)
		if err != nil {
			return err
		}
		if before, twice := at[l.Name]; twice {
			return errorAt(file, n,
				"there is a limiter %q already, in %s; remove one, or give it another name", l.Name, before)
		}
		at[l.Name] = file + ":" + strconv.Itoa(n.Line)
		s.Limiters[l.Name] = l
	}
	return nil
}

func read(file string, n *yaml.Node) (Limiter, error) {
	if n.Kind != yaml.MappingNode {
		return Limiter{}, errorAt(file, n, "a limiter has to be a mapping: lines of the form name: value")
	}
	name, reason := wrongField(n, "name", "policy", "durable", "synchronous_commit", "on_failure")
	if name != nil {
		return Limiter{}, errorAt(file, name, "%s", reason)
	}
	l := Limiter{File: file, Line: n.Line}
	var policy, onFailure string
	for _, f := range []struct {
		name, form string
		to         any
	}{
		{"name", "text", &l.Name}, {"policy", "text", &policy}, {"durable", "true or false", &l.Durable},
		{"synchronous_commit", "true or false", &l.SynchronousCommit}, {"on_failure", "text", &onFailure},
	} {
		if value := field(n, f.name); value != nil && value.Decode(f.to) != nil {
			return Limiter{}, errorAt(file, value, "%s has to be %s", f.name, f.form)
		}
	}
	switch {
	case l.Name == "":
		return Limiter{}, errorAt(file, n, "the limiter has no name; write name: login")
	case policy == "":
		return Limiter{}, errorAt(file, n, "the limiter has no policy; write policy: sliding 10/1m")
	}
	var err error
	if l.Policy, err = ratelimit.ParsePolicy(policy); err != nil {
		return Limiter{}, errorAt(file, field(n, "policy"), "%v", err)
	}
	if onFailure != "" {
		mode, err := ParseFailureMode(onFailure)
		if err != nil {
			return Limiter{}, errorAt(file, field(n, "on_failure"), "%v", err)
		}
		l.OnFailure = &mode
	}
	return l, nil
}

// wrongField returns the name of a field that is not known, or that is there twice, and what is wrong with it. If all
// fields are right, it returns nil.
func wrongField(n *yaml.Node, known ...string) (name *yaml.Node, reason string) {
	seen := make(map[string]bool)
	for i := 0; i+1 < len(n.Content); i += 2 {
		name = n.Content[i]
		switch {
		case !slices.Contains(known, name.Value):
			return name, fmt.Sprintf("the field %q is unknown; the fields are %s",
				name.Value, strings.Join(known, ", "))
		case seen[name.Value]:
			return name, fmt.Sprintf("the field %s is there twice", name.Value)
		}
		seen[name.Value] = true
	}
	return nil, ""
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
