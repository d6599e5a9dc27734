package cli

import (
	"io/fs"
	"strings"

	"github.com/pressly/goose/v3"

	"github.com/pgratelimit/ratelimit/migrations"
)

// Migration is a file of package migrations.
type Migration struct {
	File     string
	Version  int64  `json:"version"`
	SQL      string `json:"sql"`
	Up, Down string
}

// ReadMigrations returns all migrations, ordered by version.
func ReadMigrations() ([]Migration, error) {
	files, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		return nil, err
	}
	all := make([]Migration, len(files))
	for i, file := range files {
		content, err := fs.ReadFile(migrations.FS, file)
		if err != nil {
			return nil, err
		}
		version, err := goose.NumericComponent(file)
		if err != nil {
			return nil, err
		}
		up, down, _ := strings.Cut(string(content), "-- +goose Down\n")
		_, up, _ = strings.Cut(up, "-- +goose Up\n")
		all[i] = Migration{File: file, Version: version, Up: withoutGoose(up), Down: withoutGoose(down)}
	}
	return all, nil
}

// withoutGoose removes the comments for goose from a migration.
func withoutGoose(sql string) string {
	var kept strings.Builder
	for line := range strings.Lines(sql) {
		if !strings.HasPrefix(line, "-- +goose ") {
			kept.WriteString(line)
		}
	}
	return strings.TrimSpace(kept.String()) + "\n"
}
