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

// The application's clock decides nothing. It is read for the time between two readings in one process alone, which is monotonic, and
// never leaves the process, but as the time of a decision that the database has no part in. A test cannot
// set a Go program's clock without setting the machine's, so this one reads the source.
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
				if !ok || !isIdent(call.X, "time") || !slices.Contains([]string{"Now", "Since", "Until"}, call.Sel.Name) {
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
		"all.go: AllowAll", "all.go: AllowAllTx", // how long a call took
		"breaker.go: newBreaker", "breaker.go: clock", // how long the database has been away
		"coalesce.go: enqueue", "coalesce.go: fly", "coalesce.go: fly", "coalesce.go: send", // how long a call has waited, or a statement took
		"denials.go: newDenials", "denials.go: local", // how old a denial is
		"failure.go: substitute", "failure.go: substitute", "fallback.go: newFallback", // when there is no database to decide
		"held.go: isHeld", "held.go: found", "held.go: askHeld", "held.go: giveUp", "held.go: waitAlone", "held.go: waitAlone", "held.go: waitAlone", "held.go: ask", "held.go: ask", // how long a row was held
		"observer.go: ended", "observer.go: endedAll", "observer.go: sent", "ratelimit.go: New", "ratelimit.go: allow", "ratelimit.go: allowTx", // how long a call or a statement took
		"wait.go: settle", "wait.go: answerAll", "wait.go: refuse", // how long it is to the retry time
	}, readers)
}

func isIdent(e ast.Expr, name string) bool {
	ident, ok := e.(*ast.Ident)
	return ok && ident.Name == name
}
