package testkit

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// Journal collects the output of loggers. Its zero value is empty.
type Journal struct {
	mu   sync.Mutex
	text bytes.Buffer
	read int // the length of the text that Lines has returned
}

// Write implements io.Writer.
func (j *Journal) Write(line []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(line)
}

// Logger returns a logger that writes lines of text.
func (j *Journal) Logger() *slog.Logger { return slog.New(slog.NewTextHandler(j, nil)) }

// JSONLogger returns a logger whose lines Entries can read.
func (j *Journal) JSONLogger() *slog.Logger { return slog.New(slog.NewJSONHandler(j, nil)) }

// String returns all output.
func (j *Journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

// Lines returns the lines written since its last call.
func (j *Journal) Lines() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	text := j.text.String()[j.read:]
	j.read += len(text)
	return strings.FieldsFunc(text, func(c rune) bool { return c == '\n' })
}

// Entries returns all lines, parsed as JSON.
func (j *Journal) Entries(t testing.TB) (entries []map[string]any) {
	t.Helper()
	for line := range strings.Lines(j.String()) {
		var entry map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &entry))
		entries = append(entries, entry)
	}
	return entries
}
