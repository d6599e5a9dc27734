package demo

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// record is a row with all values as text, as psql gets them.
type record []struct{ column, value string }

// queryRecord returns the only row of a query.
func queryRecord(ctx context.Context, pool *pgxpool.Pool, sql string) (record, error) {
	rows, err := pool.Query(ctx, sql, pgx.QueryExecModeSimpleProtocol) // in the simple protocol, all values are text
	if err != nil {
		return nil, err
	}
	return pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (record, error) {
		fields := row.FieldDescriptions()
		record := make(record, len(fields))
		for i, value := range row.RawValues() {
			record[i].column, record[i].value = fields[i].Name, string(value)
		}
		return record, nil
	})
}

func (r record) value(column string) string {
	for _, field := range r {
		if field.column == column {
			return field.value
		}
	}
	return ""
}

// String formats the row like psql after \gx.
func (r record) String() string {
	var columns, values int
	for _, field := range r {
		columns, values = max(columns, len(field.column)), max(values, len(field.value))
	}
	var text strings.Builder
	header := []byte(strings.Repeat("-", columns+1) + "+" + strings.Repeat("-", values+1))
	copy(header, "-[ RECORD 1 ]")
	fmt.Fprintf(&text, "%s\n", header)
	for _, field := range r {
		fmt.Fprintf(&text, "%-*s | %s\n", columns, field.column, field.value)
	}
	return text.String()
}
