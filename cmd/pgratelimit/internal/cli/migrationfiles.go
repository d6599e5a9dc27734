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
func ReadMigrations() (all []Migration) {
	files, _ := fs.Glob(migrations.FS, "*.sql") // the files are embedded, so there are no errors
	for _, file := range files {
		content, _ := fs.ReadFile(migrations.FS, file)
		version, _ := goose.NumericComponent(file)
		up, down, _ := strings.Cut(string(content), "-- +goose Down\n")
		_, up, _ = strings.Cut(up, "-- +goose Up\n")
		all = append(all, Migration{File: file, Version: version, Up: withoutGoose(up), Down: withoutGoose(down)})
	}
	return all
}

func LatestVersion() int64 {
	all := ReadMigrations()
	return all[len(all)-1].Version
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
