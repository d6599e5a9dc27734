package engine

import (
	"embed"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// calls has the statements that call the functions of the database.
//
//go:embed call/*.sql
var calls embed.FS

// Text returns the statement NAME.sql of the folder call. TestEveryAlgorithmIsComplete fails if one is missing.
func Text(name, schema string) string {
	text, _ := calls.ReadFile("call/" + name + ".sql")
	return pg.Qualify(string(text), schema)
}

// ArgumentsOf returns a policy's numbers in the order in which the function of its algorithm takes them.
func ArgumentsOf(n algorithm.Numbers) []any {
	switch {
	case n.Refills():
		return []any{n.Limit, n.Refill, model.Micros(n.Span)}
	case n.Zoned():
		return []any{n.Limit, model.Micros(n.Span), n.Zone}
	}
	return []any{n.Limit, model.Micros(n.Span)}
}
