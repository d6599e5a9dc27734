package ratelimit

import (
	"go/ast"
	"go/parser"
	"go/token"
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

	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	var readers []string
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
				readers = append(readers, name+": "+function.Name.Name)
				return true
			})
		}
	}
	require.Equal(t, []string{
		"allow.go: allow",                                                       // how long a call took
		"allow.go: observe", "allowall.go: AllowAll", "allowall.go: observeAll", // how long a call took
		"ban.go: newStrikes", "ban.go: count", // how long ago a key was first denied
		"batch.go: send", "batch.go: ask", "batch.go: ask", "batch.go: ask", "batch.go: deliver", "batch.go: report", "batch.go: observe", // how long a statement took
		"breaker.go: clock", "client.go: NewClient", // how long the database has been away
		"denials.go: newDenials", "denials.go: elapsed", // how old a denial is
		// when there is no database to decide
		"failuremode.go: answerOnFailure", "failuremode.go: answerOnFailure", "fallback.go: newFallback", "fallback.go: now",
		"heldkeys.go: find", "heldkeys.go: found", "heldkeys.go: still", // how long a row was held
		"heldlane.go: giveUp", "heldlane.go: waitForFirst", "heldlane.go: waitForFirst", "heldlane.go: waitForFirst",
		"inmemory.go: decideInMemory",                // the clock of a database in memory
		"leases.go: clocksOf", "leases.go: clocksOf", // how long ago a lease was taken
		// the database's clock is read once, and the time since then added; how long ago the last question was
		"policies.go: Status", "policies.go: now",
		"policywatch.go: Run", "policywatch.go: Run", "policywatch.go: poll", "policywatch.go: poll", "policywatch.go: listen", "policywatch.go: listen",
		"policywatch.go: listen", "policywatch.go: listen", "policywatch.go: load", "policywatch.go: loadSince", "policywatch.go: loadSince",
		// how long a call has waited, or a statement took
		"queue.go: submit", "queue.go: submitAll", "queue.go: departs", "queue.go: leaveLate", "queue.go: fly", "queue.go: fly",
		"shards.go: asksElsewhere",                   // whether a call was made before
		"statement.go: blame", "statement.go: blame", // how long ago it has hung
		"troublelog.go: note", "troublelog.go: noteDecision", "tx.go: AllowN", // how long the database has been away
		"wait.go: answerAndObserve", "waitline.go: sleep", "waitline.go: sleep", "waitline.go: settle", "waitline.go: refuse", // how long it is to the retry time
	}, readers)
}

func isIdent(e ast.Expr, name string) bool {
	ident, ok := e.(*ast.Ident)
	return ok && ident.Name == name
}
