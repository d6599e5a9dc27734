package ratelimit_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/migrations"
)

// Each row of algorithm.All has a policy, files, and a function in the database.
func TestEveryAlgorithmIsComplete(t *testing.T) {
	t.Parallel()

	read := func(file string) string {
		content, err := os.ReadFile(file)
		require.NoError(t, err)
		return string(content)
	}
	functions, err := migrations.FS.ReadFile("00002_create_functions.sql")
	require.NoError(t, err)
	tried := map[int16]bool{}
	for _, policy := range limitertest.SlowPolicies(1) {
		tried[limitertest.Rule(policy).Numbers().Algorithm] = true
	}
	for i, a := range algorithm.All() {
		require.EqualValues(t, i+1, a.Code)
		require.Equal(t, a, algorithm.ByCode(a.Code))
		byWord, ok := algorithm.ByWord(a.Word)
		require.True(t, ok)
		require.Equal(t, a, byWord)

		// The algorithm has a policy.
		all, err := algorithm.Parse(a.Example)
		require.NoError(t, err)
		require.Len(t, all, 1)
		require.Equal(t, a.Code, all[0].Algorithm)
		policy := limitertest.Policy(all[0])
		require.Equal(t, all[0], limitertest.Rule(policy).Numbers())
		require.Equal(t, a.Example, policy.String())
		require.Equal(t, []model.Rules{limitertest.Rule(policy)}, limitertest.Model(policy).Rules)
		parsed, err := ratelimit.ParsePolicy(a.Example)
		require.NoError(t, err)
		require.Equal(t, policy, parsed)
		require.Len(t, engine.ArgumentsOf(all[0]), len(a.Arguments))

		// The algorithm has files.
		require.Contains(t, read(a.File+".go"), "package ratelimit\n")
		require.Contains(t, read("internal/model/"+a.File+".go"), "var _ Rules = ")
		require.Contains(t, read("internal/model/"+a.File+"_test.go"), "func Test")
		statement := engine.Text(a.File, "")
		require.Equal(t, read("internal/engine/call/"+a.File+".sql"), statement)
		require.Contains(t, statement, "SELECT "+a.Function+"(\n")
		require.Contains(t, read("sql/"+a.File+".sql"), "CREATE FUNCTION "+a.Function+"(")
		require.Contains(t, read("sql/all.sql"), fmt.Sprintf("algorithm = %d THEN\n        RETURN _rate_limit_", a.Code))
		require.Contains(t, read("sql/policy.sql"), "words[1] = '"+a.Word+"'")
		require.Contains(t, read("sql/policy.sql"), `"`+a.Example+`"`)
		require.Contains(t, read("sql/install.sql"), `\ir `+a.File+".sql\n")
		require.Contains(t, read("sql/access.sql"), "'"+a.Function+"'")
		require.Contains(t, read("sql/allow.sql"), a.Example)

		// The algorithm has a function in the database.
		arguments := ""
		for _, argument := range a.Arguments {
			kind := "bigint"
			if argument == "zone" {
				kind = "text"
			}
			arguments += argument + " " + kind + ", "
		}
		require.Contains(t, string(functions),
			"\nCREATE FUNCTION "+a.Function+"(\n    name text, keys text[], "+strings.TrimSuffix(arguments, " ")+"\n    costs ")
		for _, file := range []string{"deploy/grants.sql", "docs/operating.md", "cmd/pgratelimit/internal/cli/sql/foreign.sql"} {
			require.Contains(t, read(file), a.Function, file)
		}
		require.Contains(t, read("docs/algorithms.md"), "`"+a.Example+"`")

		// Tests that try all algorithms try this one.
		require.Contains(t, tried, a.Code, "limitertest.SlowPolicies")
		require.Contains(t, limitertest.PolicyTexts(), a.Example)
		require.Contains(t, read("internal/modeltest/history.go"), fmt.Sprintf("case %T:", limitertest.Rule(policy)))
	}
}
