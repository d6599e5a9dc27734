package sql_test

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// All SQL is ASCII, which is part of every encoding. SQL has no backslash, because a setting decides what a backslash
// in a literal means. Lines have at most 120 columns, except in scripts for administrators.
func TestSQLIsPlain(t *testing.T) {
	t.Parallel()

	odd := regexp.MustCompile(`[^\n -~]|\\`)
	long := regexp.MustCompile(`.{121,}`)
	for _, pattern := range []string{
		"*.sql", "../internal/*/call/*.sql", "../migrations/*.sql", "../cleanup/*.sql", "../deploy/*.sql",
		"../cmd/pgratelimit/internal/*/sql/*.sql", "../internal/catalog/*.sql",
	} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		require.NotEmpty(t, files, pattern)
		for _, file := range files {
			content, err := os.ReadFile(file)
			require.NoError(t, err)
			if file != "install.sql" { // psql reads install.sql, and needs backslashes
				require.Empty(t, odd.FindString(string(content)), file)
			}
			if pattern != "../deploy/*.sql" {
				require.Empty(t, long.FindString(string(content)), file)
			}
		}
	}
}
