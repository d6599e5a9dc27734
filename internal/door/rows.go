package door

import (
	"fmt"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/wire"
)

// These bytes say of which type an argument of a statement is.
const (
	argumentNull = iota
	argumentBool
	argumentInt
	argumentText
	argumentTime
	argumentInts
	argumentTexts
)

// appendArguments appends the arguments of a statement.
func appendArguments(b []byte, arguments []any) ([]byte, error) {
	b = wire.AppendInt(b, int64(len(arguments)))
	for i, argument := range arguments {
		v := reflect.ValueOf(argument)
		if v.Kind() == reflect.Pointer {
			v = v.Elem() // the zero Value if it is nil
		}
		if v.Kind() == reflect.Slice && v.IsNil() {
			v = reflect.Value{}
		}
		if !v.IsValid() {
			b = append(b, argumentNull)
			continue
		}
		switch value := v.Interface().(type) {
		case time.Time:
			b = wire.AppendInt(append(b, argumentTime), value.UnixMicro())
			continue
		case []int64:
			b = wire.AppendInt(append(b, argumentInts), int64(len(value)))
			for _, n := range value {
				b = wire.AppendInt(b, n)
			}
			continue
		case []string:
			b = wire.AppendInt(append(b, argumentTexts), int64(len(value)))
			for _, text := range value {
				b = wire.AppendText(b, text)
			}
			continue
		}
		switch {
		case v.Kind() == reflect.Bool:
			b = wire.AppendBool(append(b, argumentBool), v.Bool())
		case v.CanInt():
			b = wire.AppendInt(append(b, argumentInt), v.Int())
		case v.Kind() == reflect.String:
			b = wire.AppendText(append(b, argumentText), v.String())
		default:
			err := fmt.Errorf("argument %d is a %T, which no service takes", i+1, argument)
			return nil, pg.NewError(err, pg.ErrSetup)
		}
	}
	return b, nil
}

func readArguments(m *wire.Reader) []any {
	arguments := make([]any, m.Count())
	for i := range arguments {
		switch m.Byte() {
		case argumentNull:
		case argumentBool:
			arguments[i] = m.Bool()
		case argumentInt:
			arguments[i] = m.Int()
		case argumentText:
			arguments[i] = m.Text()
		case argumentTime:
			arguments[i] = time.UnixMicro(m.Int())
		case argumentInts:
			numbers := make([]int64, m.Count())
			for j := range numbers {
				numbers[j] = m.Int()
			}
			arguments[i] = numbers
		case argumentTexts:
			texts := make([]string, m.Count())
			for j := range texts {
				texts[j] = m.Text()
			}
			arguments[i] = texts
		default:
			m.Fail()
		}
	}
	return arguments
}

func appendFields(b []byte, fields []pgconn.FieldDescription) []byte {
	b = wire.AppendInt(b, int64(len(fields)))
	for _, f := range fields {
		b = wire.AppendText(b, f.Name)
		b = wire.AppendInt(wire.AppendInt(b, int64(f.DataTypeOID)), int64(f.Format))
	}
	return b
}

func readFields(m *wire.Reader) []pgconn.FieldDescription {
	fields := make([]pgconn.FieldDescription, m.Count())
	for i := range fields {
		fields[i].Name = m.Text()
		fields[i].DataTypeOID, fields[i].Format = uint32(m.Int()), m.Int16()
	}
	return fields
}

func appendRow(b []byte, values [][]byte) []byte {
	for _, value := range values {
		if b = wire.AppendBool(b, value != nil); value != nil {
			b = wire.AppendText(b, value)
		}
	}
	return b
}

func readRow(m *wire.Reader, columns int) [][]byte {
	row := make([][]byte, columns)
	for i := range row {
		if m.Bool() {
			row[i] = m.Bytes()
		}
	}
	return row
}

// rows are the rows of a statement that the service has run.
type rows struct {
	fields []pgconn.FieldDescription
	rows   [][][]byte // the rows after the current one, with it
	begun  bool
	err    error
	types  *pgtype.Map
}

var _ pgx.Rows = (*rows)(nil)

func (r *rows) Next() bool {
	if r.begun && len(r.rows) > 0 {
		r.rows = r.rows[1:]
	}
	r.begun = true
	return len(r.rows) > 0
}

func (r *rows) Scan(targets ...any) error {
	if err := pgx.ScanRow(r.types, r.fields, r.RawValues(), targets...); err != nil {
		r.err = err
		r.Close()
	}
	return r.err
}

func (r *rows) Values() ([]any, error) {
	values := make([]any, len(r.fields))
	into := make([]any, len(values))
	for i := range values {
		into[i] = &values[i]
	}
	return values, r.Scan(into...)
}

func (r *rows) RawValues() [][]byte {
	if !r.begun || len(r.rows) == 0 {
		return nil
	}
	return r.rows[0]
}

func (r *rows) Close()                                       { r.rows = nil }
func (r *rows) Err() error                                   { return r.err }
func (r *rows) FieldDescriptions() []pgconn.FieldDescription { return r.fields }
func (r *rows) TypeMap() *pgtype.Map                         { return r.types }
func (*rows) CommandTag() pgconn.CommandTag                  { return pgconn.CommandTag{} }
func (*rows) Conn() *pgx.Conn                                { return nil }
