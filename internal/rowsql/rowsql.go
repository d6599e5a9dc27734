// Package rowsql has the queries by which people look at the rows of a limiter. They take nothing.
package rowsql

import (
	_ "embed"
	"strings"
)

var (
	// Peek returns what keys of a limiter have left.
	//go:embed peek.sql
	Peek string
	// NextKeys returns the next keys of a limiter, in order.
	//go:embed next_keys.sql
	NextKeys string
	// Slots returns the slots of a limiter and the places in its lines.
	//go:embed slots.sql
	Slots string
	// Holds returns the holds of a limiter.
	//go:embed holds.sql
	Holds string
	// Bans returns the bans of a limiter.
	//go:embed bans.sql
	Bans string
)

// InTable makes a query read rate_limit_durable instead of rate_limit_ephemeral if durable is true.
func InTable(sql string, durable bool) string {
	if durable {
		return strings.ReplaceAll(sql, "rate_limit_ephemeral", "rate_limit_durable")
	}
	return sql
}
