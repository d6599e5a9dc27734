package sqldb

import (
	"database/sql"
	"errors"
	"reflect"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// query converts a result of database/sql to pgx.Rows.
func query(found *sql.Rows, err error) (pgx.Rows, error) {
	switch {
	case errors.Is(err, sql.ErrTxDone):
		return nil, pg.TxEnded(err)
	case err != nil:
		if refused := pg.Unencoded(err); refused != nil {
			return nil, refused
		}
		return nil, err
	}
	columns, err := found.Columns()
	if err != nil {
		_ = found.Close() // the error above says more
		return nil, err
	}
	return &rows{Rows: found, columns: columns, types: pgtype.NewMap()}, nil
}

// rows implements the methods of pgx.Rows that limiters and sweepers call.
type rows struct {
	*sql.Rows
	columns []string
	types   *pgtype.Map
	err     error // from Scan
}

var _ pgx.Rows = (*rows)(nil)

func (r *rows) Close() { _ = r.Rows.Close() } // Err returns the error of Close

func (r *rows) Err() error { return errors.Join(r.err, r.Rows.Err()) }

// FieldDescriptions returns only the names of the columns.
func (r *rows) FieldDescriptions() []pgconn.FieldDescription {
	fields := make([]pgconn.FieldDescription, len(r.columns))
	for i, name := range r.columns {
		fields[i].Name = name
	}
	return fields
}

// Scan also reads arrays, unlike the Scan of database/sql.
func (r *rows) Scan(targets ...any) error {
	into := make([]any, len(targets))
	for i, target := range targets {
		switch {
		case target == nil: // skip the column
			into[i] = new(any)
		case reflect.TypeOf(target).Elem().Kind() == reflect.Slice:
			into[i] = r.types.SQLScanner(target)
		default:
			into[i] = target
		}
	}
	if err := r.Rows.Scan(into...); err != nil {
		r.err = pgx.ScanArgError{FieldName: "?column?", Err: err}
		r.Close()
	}
	return r.err
}

func (r *rows) Values() ([]any, error) {
	values, into := make([]any, len(r.columns)), make([]any, len(r.columns))
	for i := range values {
		into[i] = &values[i]
	}
	return values, r.Scan(into...)
}

func (r *rows) TypeMap() *pgtype.Map        { return r.types }
func (*rows) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }
func (*rows) RawValues() [][]byte           { return nil }
func (*rows) Conn() *pgx.Conn               { return nil }
