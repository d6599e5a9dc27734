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

// No decision of the database depends on the application's clock. The application only measures the time between two
// readings in one process, by a monotonic clock. A single reading is returned only as the time of a decision that the
// database did not make. A test cannot change the clock of a Go program, so this test reads the source.
func TestApplicationsClockIsReadForDifferencesOnly(t *testing.T) {
	t.Parallel()

	readers := map[string]bool{}
	for _, folder := range []string{"", "internal/engine/", "internal/keeper/", "internal/policytable/", "internal/waitline/"} {
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
		// the duration of a call, or the time of a decision without a database
		"allow.go: allow", "allow.go: observe", "allowall.go: allowall", "allowall.go: observeall",
		"failuremode.go: answeronfailure", "hold.go: hold", "hold.go: holdall",
		// the duration of a statement
		"internal/engine/batch.go: ask", "internal/engine/batch.go: deliver", "internal/engine/batch.go: observe",
		"internal/engine/batch.go: report", "internal/engine/batch.go: send",
		// for how long the database has been away
		"internal/engine/breaker.go: clock",
		"internal/engine/denials.go: elapsed", "internal/engine/denials.go: newdenials", // the age of a denial
		"internal/engine/engine.go: newqueue",
		// the time of a decision without a database
		"internal/engine/fallback.go: newfallback", "internal/engine/fallback.go: now",
		// for how long a row was held
		"internal/engine/heldkeys.go: find", "internal/engine/heldkeys.go: found", "internal/engine/heldkeys.go: still",
		"internal/engine/heldlane.go: giveup", "internal/engine/heldlane.go: waitforfirst",
		"internal/engine/inmemory.go: memorynow", // the clock of a database in memory
		// the age of a lease
		"internal/engine/leases.go: clocksof",
		// how long a call has waited
		"internal/engine/queue.go: departs", "internal/engine/queue.go: fly", "internal/engine/queue.go: leavelate",
		"internal/engine/queue.go: submit", "internal/engine/queue.go: submitall",
		"internal/engine/shards.go: askselsewhere", // whether a call was made earlier
		"internal/engine/statement.go: blame",      // for how long a statement has hung
		"internal/engine/trip.go: endtrips",        // how long a request was on its way to a service and back
		"internal/engine/troublelog.go: note", "internal/engine/troublelog.go: notedecision",
		// the time since a slot was last renewed
		"internal/keeper/keeper.go: apply", "internal/keeper/keeper.go: confirm", "internal/keeper/keeper.go: due",
		"internal/keeper/keeper.go: expect", "internal/keeper/keeper.go: out", "internal/keeper/keeper.go: renew",
		// the time since a key's first denial
		"internal/policytable/bans.go: count", "internal/policytable/bans.go: newstrikes",
		// the time since the database's clock was read once, to know what it shows now; the time since policies were
		// last read
		"internal/policytable/changes.go: applychanges", "internal/policytable/changes.go: readchanges",
		"internal/policytable/changes.go: readsince",
		"internal/policytable/table.go: now", "internal/policytable/table.go: status",
		"internal/policytable/watch.go: listen",
		"internal/policytable/watch.go: poll", "internal/policytable/watch.go: run",
		// the time left until the retry
		"internal/waitline/waitline.go: refuse", "internal/waitline/waitline.go: settle", "internal/waitline/waitline.go: sleep",
		"reserve.go: reserve", "slot.go: ask", "slot.go: tryacquire", "tx.go: allown", "wait.go: answerandobserve",
	}, slices.Sorted(maps.Keys(readers)))
}

func isIdent(e ast.Expr, name string) bool {
	ident, ok := e.(*ast.Ident)
	return ok && ident.Name == name
}
