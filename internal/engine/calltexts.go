package engine

import (
	"embed"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// calls contains the SQL files of the folder call. Each file is a statement that calls a function of the database.
//
//go:embed call/*.sql
var calls embed.FS

// Text returns the statement in call/NAME.sql, for functions in a schema. It returns "" if the file is missing.
func Text(name, schema string) string {
	text, _ := calls.ReadFile("call/" + name + ".sql")
	return pg.Qualify(string(text), schema)
}

// ArgumentsOf returns a policy's numbers, in the order of the parameters of the algorithm's SQL function.
func ArgumentsOf(n algorithm.Numbers) []any {
	switch {
	case n.Refills():
		return []any{n.Limit, n.Refill, model.Micros(n.Span)}
	case n.Zoned():
		return []any{n.Limit, model.Micros(n.Span), n.Zone}
	}
	return []any{n.Limit, model.Micros(n.Span)}
}

// echoStatement shows whether the database's encoding has a text.
const echoStatement = "SELECT $1::pg_catalog.text"

// Statements returns the statements that a process sends to its service, besides its requests. The schema is not in
// them.
func Statements() []string {
	return []string{Text("findhold", ""), Text("renew", ""), Text("reset", ""), pg.VersionStatement, echoStatement}
}
