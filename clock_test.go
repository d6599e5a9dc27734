package ratelimit_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The application's clock decides nothing. It only measures the time between two readings in one process, which is
// monotonic. A reading leaves the process only as the time of a decision in which the database has no part. A test
// cannot set the clock of a Go program without setting the machine's, so this one reads the source.
func TestApplicationsClockIsReadForDifferencesOnly(t *testing.T) {
	t.Parallel()

	readers := map[string]bool{}
	for _, folder := range []string{"", "internal/engine/", "internal/policytable/", "internal/waitline/"} {
		files, err := filepath.Glob(folder + "*.go")
		require.NoError(t, err)
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
			require.NoError(t, err)
			for _, declaration := range file.Decls {
				ast.Inspect(declaration, func(node ast.Node) bool {
					call, ok := node.(*ast.SelectorExpr)
					if !ok || !isIdent(call.X, "time") ||
						!slices.Contains([]string{"Now", "Since", "Until"}, call.Sel.Name) {
						return true
					}
					function, ok := declaration.(*ast.FuncDecl)
					require.True(t, ok, name)
					readers[name+": "+strings.ToLower(function.Name.Name)] = true
					return true
				})
			}
		}
	}
	require.Equal(t, []string{
		// how long a call took, or when there is no database to decide
		"allow.go: allow", "allow.go: observe", "allowall.go: allowall", "allowall.go: observeall",
		"failuremode.go: answeronfailure",
		"internal/engine/batch.go: ask", "internal/engine/batch.go: deliver", "internal/engine/batch.go: observe", // how long a statement took
		"internal/engine/batch.go: report", "internal/engine/batch.go: send",
		"internal/engine/breaker.go: clock",                                             // how long the database has been away
		"internal/engine/denials.go: elapsed", "internal/engine/denials.go: newdenials", // how old a denial is
		"internal/engine/engine.go: newqueue",
		"internal/engine/fallback.go: newfallback", "internal/engine/fallback.go: now", // when there is no database to decide
		"internal/engine/heldkeys.go: find", "internal/engine/heldkeys.go: found", "internal/engine/heldkeys.go: still", // how long a row was held
		"internal/engine/heldlane.go: giveup", "internal/engine/heldlane.go: waitforfirst",
		"internal/engine/inmemory.go: decideinmemory",                                                               // the clock of a database in memory
		"internal/engine/leases.go: clocksof",                                                                       // how long ago a lease was taken
		"internal/engine/queue.go: departs", "internal/engine/queue.go: fly", "internal/engine/queue.go: leavelate", // how long a call has waited
		"internal/engine/queue.go: submit", "internal/engine/queue.go: submitall",
		"internal/engine/shards.go: askselsewhere", // whether a call was made before
		"internal/engine/statement.go: blame",      // how long ago it has hung
		"internal/engine/troublelog.go: note", "internal/engine/troublelog.go: notedecision",
		// how long ago a key was first denied
		"internal/policytable/bans.go: count", "internal/policytable/bans.go: newstrikes",
		// the database's clock is read once, and the time since then added; how long ago the last question was
		"internal/policytable/table.go: now", "internal/policytable/table.go: status",
		"internal/policytable/watch.go: listen", "internal/policytable/watch.go: load", "internal/policytable/watch.go: loadsince",
		"internal/policytable/watch.go: poll", "internal/policytable/watch.go: run",
		// how long it is to the retry time
		"internal/waitline/waitline.go: refuse", "internal/waitline/waitline.go: settle", "internal/waitline/waitline.go: sleep",
		"tx.go: allown", "wait.go: answerandobserve",
	}, slices.Sorted(maps.Keys(readers)))
}

func isIdent(e ast.Expr, name string) bool {
	ident, ok := e.(*ast.Ident)
	return ok && ident.Name == name
}
