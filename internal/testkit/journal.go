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

// Journal collects the output of loggers. The zero value is an empty journal.
type Journal struct {
	mu   sync.Mutex
	text bytes.Buffer
	read int // how many bytes Lines has returned so far
}

// Write implements io.Writer.
func (j *Journal) Write(line []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.Write(line)
}

// Logger returns a logger that writes lines of text to the journal.
func (j *Journal) Logger() *slog.Logger { return slog.New(slog.NewTextHandler(j, nil)) }

// JSONLogger returns a logger that writes lines of JSON, which Entries can read, to the journal.
func (j *Journal) JSONLogger() *slog.Logger { return slog.New(slog.NewJSONHandler(j, nil)) }

// String returns everything that was written to the journal.
func (j *Journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.text.String()
}

// Lines returns the lines that were written since the previous call of Lines.
func (j *Journal) Lines() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	text := j.text.String()[j.read:]
	j.read += len(text)
	return strings.FieldsFunc(text, func(c rune) bool { return c == '\n' })
}

// Entries parses every line of the journal as JSON.
func (j *Journal) Entries(t testing.TB) (entries []map[string]any) {
	t.Helper()
	for line := range strings.Lines(j.String()) {
		var entry map[string]any
		require.NoError(t, json.Unmarshal([]byte(line), &entry))
		entries = append(entries, entry)
	}
	return entries
}
