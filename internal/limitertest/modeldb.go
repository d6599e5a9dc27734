package limitertest

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

// ModelDB is a database in memory, for tests in a bubble of testing/synctest. In such a bubble, a connection to a real
// database would stop time. ModelDB decides by package model and the bubble's clock, and a test can make it fail. It has
// no holds: a statement for a hold panics.
type ModelDB struct {
	Mu     sync.Mutex
	Away   func(ctx context.Context) error // fails statements; nil if the database works
	asked  int                             // number of statements
	atOnce int                             // the largest number of statements that ran at the same time
	now    int
	Rows   modeltest.Rows
	units  int64 // units that statements took

	Takes  time.Duration    // how long a statement runs without its waits for locks; it decides after half of this time
	CutOff time.Duration    // the statement_timeout; 0 means none
	Held   map[string]int64 // by key: the transaction that locks the row; 0 if the row is being created
}

// NewModelDB returns an empty database.
func NewModelDB() *ModelDB { return &ModelDB{Rows: modeltest.NewRows()} }

// Set sets Away for all later statements, and resets the counts of statements.
func (db *ModelDB) Set(away func(ctx context.Context) error) {
	db.Mu.Lock()
	defer db.Mu.Unlock()
	db.Away, db.asked, db.atOnce = away, 0, db.now
}

// Counts returns the number of statements since the last Set, and the most that ran at the same time.
func (db *ModelDB) Counts() (asked, atOnce int) {
	db.Mu.Lock()
	defer db.Mu.Unlock()
	return db.asked, db.atOnce
}

// Statements returns the number of statements since the last Set.
func (db *ModelDB) Statements() int {
	asked, _ := db.Counts()
	return asked
}

// Taken returns how many units the statements have taken.
func (db *ModelDB) Taken() int64 {
	db.Mu.Lock()
	defer db.Mu.Unlock()
	return db.units
}

// Query decides a statement. It waits without Mu, because a goroutine that waits for a mutex stops the bubble's time.
func (db *ModelDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	db.Mu.Lock()
	if len(args) == 0 && db.Away == nil { // the statement calls rate_limit_version
		defer db.Mu.Unlock()
		return nil, &pgconn.PgError{Code: "42883"}
	}
	db.asked++
	db.now++
	db.atOnce = max(db.atOnce, db.now)
	away := db.Away
	db.Mu.Unlock()
	answer, err := (*modelRows)(nil), error(nil)
	if away != nil {
		err = away(ctx)
	}
	if err == nil {
		answer, err = db.decide(sql, args)
	}
	db.Mu.Lock()
	defer db.Mu.Unlock()
	db.now--
	if err != nil {
		return nil, err
	}
	return answer, nil
}

func (db *ModelDB) decide(sql string, args []any) (*modelRows, error) {
	requests, args, takes := askedOf(sql, args)
	lockTimeout, skip := args[10].(*int32), args[17].(bool)
	db.Mu.Lock()
	wait, code := db.Takes/2, ""
	passed := map[int][]int64{} // for each request with a locked part, the transactions that lock its parts
	for i := 0; i < len(requests) && code == ""; i++ {
		for _, p := range requests[i].Parts {
			by, ok := db.Held[p.ID.Key]
			if !ok || p.Cost == 0 {
				continue
			}
			if passed[i] == nil {
				passed[i] = slices.Repeat([]int64{engine.NotLocked}, len(requests[i].Parts))
			}
			passed[i][slices.IndexFunc(requests[i].Parts, func(q modeltest.Part) bool { return q.ID == p.ID })] = by
			if by == 0 || !skip {
				wait += time.Duration(*lockTimeout) * time.Millisecond
			}
			if !skip {
				code = "55P03"
				break
			}
		}
	}
	if db.CutOff > 0 && wait > db.CutOff {
		wait, code = db.CutOff, "57014"
	}
	lasts := db.Takes
	db.Mu.Unlock()
	Elapse(wait)
	if code != "" {
		return nil, &pgconn.PgError{Code: code, Severity: "ERROR", SeverityUnlocalized: "ERROR"}
	}
	answer := db.answer(requests, passed)
	if takes {
		answer = answer.asNumbers(sql != engine.Text("takeall", ""))
	}
	Elapse(lasts / 2)
	return answer, nil
}

// answer decides the requests that have no locked part.
func (db *ModelDB) answer(requests []modeltest.Request, passed map[int][]int64) *modelRows {
	db.Mu.Lock()
	defer db.Mu.Unlock()
	clock := time.Now().UnixMicro()
	var decided []modeltest.Request
	for i, r := range requests {
		if passed[i] == nil {
			decided = append(decided, r)
		}
	}
	db.Rows.DecideAll(decided, clock)
	answer, ord := &modelRows{}, int64(0)
	for i, r := range requests { // the slices decided and requests share their Parts
		if passed[i] == nil && r.Parts[0].Cost > 0 {
			for _, p := range r.Parts {
				db.units += p.Decision.Granted * p.Cost
			}
		}
		for j := range r.Parts {
			d := &r.Parts[j].Decision
			if passed[i] != nil {
				*d = model.Decision{Granted: engine.Undecided, DecidedAt: time.UnixMicro(clock)}
				if by := passed[i][j]; by != engine.NotLocked {
					d.Granted, d.Remaining = engine.Locked, by
				}
			}
			ord++
			answer.values = append(answer.values, []any{
				ord, d.Granted, d.Remaining, &d.RetryAfter, d.ResetAfter, d.DecidedAt.UnixMicro(),
				d.State.Count, d.State.PrevCount, d.State.WindowStart, d.State.Credit, d.State.Scale, d.State.ExpiresAt,
				d.Taken.Spent, d.Taken.Since, d.Taken.At, logOf(d.State.Log), d.Held,
			})
		}
	}
	return answer
}

// logOf returns the entries as the values of the column log.
func logOf(e model.Entries) (log []int64) {
	for i := range len(e) / 8 {
		log = append(log, e.Entry(i))
	}
	return log
}

// asNumbers converts the rows to the array that a function for takes returns. Each key has the form of a key that
// rate_limit_all has decided.
func (r *modelRows) asNumbers(logs bool) *modelRows {
	var numbers pgtype.FlatArray[pgtype.Int8]
	for _, v := range r.values {
		for _, value := range slices.Concat(v[:15], v[16:]) {
			if retryAfter, ok := value.(*int64); ok {
				value = *retryAfter
			}
			n := value.(int64)
			numbers = append(numbers, pgtype.Int8{Int64: n, Valid: n != model.Never})
		}
		if logs && len(r.values) == 1 {
			for _, entry := range v[15].([]int64) {
				numbers = append(numbers, pgtype.Int8{Int64: entry, Valid: true})
			}
		}
	}
	return &modelRows{values: [][]any{{numbers}}}
}

// askedOf returns the requests of a statement, and the arguments of rate_limit_all for the same requests. The result
// takes is true for a function that only takes.
func askedOf(sql string, args []any) (requests []modeltest.Request, asAll []any, takes bool) {
	if sql == engine.Text("findhold", "") {
		panic("limitertest: a ModelDB has no holds")
	}
	if sql == engine.Text("takeall", "") { // rate_limit_take_all
		takes, args = true, argsOfAll(args)
	} else if name, one := args[0].(string); one { // the function of one algorithm
		takes = true
		code := 1 + slices.IndexFunc(algorithm.All(), func(a algorithm.Algorithm) bool {
			return engine.Text(a.File, "") == sql
		})
		args = argsOfKeys(name, int16(code), args)
	}
	if holds, _ := args[22].([]*string); holds != nil {
		panic("limitertest: a ModelDB has no holds")
	}
	numbers := func(i int) []int64 { return args[i].([]int64) }
	refund := func(i, part int) (n int64, ok bool) {
		if all := args[i].([]*int64); all != nil && all[part] != nil {
			return *all[part], true
		}
		return 0, false
	}
	for i, owner := range args[0].([]int32) {
		zone := ""
		if zones := args[18].([]string); zones != nil {
			zone = zones[i]
		}
		p := modeltest.Part{
			ID: modeltest.RowID{Name: args[1].([]string)[i], Key: args[2].([]string)[i]}, Durable: args[3].([]bool)[i], Cost: 1,
			Policy: Rule(Policy(algorithm.Numbers{
				Algorithm: args[4].([]int16)[i],
				Limit:     numbers(5)[i], Span: model.Duration(numbers(6)[i]), Refill: numbers(7)[i], Zone: zone,
			})),
		}
		if numbers(8) != nil {
			p.Cost = numbers(8)[i]
		}
		leased := int64(0)
		if all := numbers(19); all != nil {
			leased = all[i]
		}
		if since, ok := refund(13, i); ok {
			k := model.Take{Since: since, Ended: leased}
			k.In, _ = refund(14, i)
			k.At, _ = refund(15, i)
			k.Spent, _ = refund(16, i)
			p.Refund = []model.Take{k}
		}
		if i == 0 || owner != args[0].([]int32)[i-1] {
			requests = append(requests, modeltest.Request{Count: 1})
		}
		r := &requests[len(requests)-1]
		r.Parts = append(r.Parts, p)
		if charges := args[20].([]bool); charges != nil {
			r.Charge = charges[i]
		}
		if delays := args[23].([]*int64); delays != nil {
			r.Delay = delays[i]
		}
		if numbers(9) != nil {
			r.Count = numbers(9)[i]
		}
		if p.Cost > 0 {
			r.Ahead = leased / p.Cost
		}
	}
	return requests, args, takes
}

// argsOfKeys converts the arguments of an algorithm's function to those of rate_limit_all.
func argsOfKeys(name string, code int16, args []any) []any {
	keys, of := args[1].([]string), args[8:]
	numbers := algorithm.Numbers{Algorithm: code, Limit: of[0].(int64)}
	switch a := algorithm.ByCode(code); {
	case a.Refills():
		numbers.Refill, of = of[1].(int64), of[1:]
	case a.Zoned():
		numbers.Zone = of[2].(string)
	}
	numbers.Span = model.Duration(of[1].(int64))
	all, none := ArgumentsOfAll(name, keys, numbers), []*int64(nil)
	all[3] = slices.Repeat([]bool{args[4].(bool)}, len(keys))
	copy(all[8:], args[2:4])
	copy(all[10:], []any{args[5], args[6], timeOf(args[7].(*int64)), none, none, none, none})
	all[19], all[20], all[23] = []int64(nil), []bool(nil), none
	return all
}

// timeOf converts microseconds since 1970 to a time. It returns nil for nil.
func timeOf(micros *int64) *time.Time {
	if micros == nil {
		return nil
	}
	return new(time.UnixMicro(*micros))
}

// argsOfAll converts the arguments of rate_limit_take_all to those of rate_limit_all.
func argsOfAll(args []any) []any {
	of, none := args[10].([]int32), []*int64(nil)
	return []any{
		args[9], ofRows[string](args[0], of), ofRows[string](args[1], of), slices.Repeat([]bool{args[2].(bool)}, len(of)),
		ofRows[int16](args[3], of), ofRows[int64](args[4], of), ofRows[int64](args[5], of),
		ofRows[int64](args[6], of), args[11], args[12], args[13], args[14], timeOf(args[15].(*int64)), none, none, none, none, false,
		ofRows[string](args[7], of), []int64(nil), []bool(nil), nil, nil, none,
	}
}

// ofRows returns, for each part, the element of its row. The row numbers in the argument of begin at 1.
func ofRows[T any](all any, of []int32) []T {
	rows := all.([]T)
	if rows == nil {
		return nil
	}
	parts := make([]T, len(of))
	for i, row := range of {
		parts[i] = rows[row-1]
	}
	return parts
}

// modelRows are the rows that a statement returns.
type modelRows struct {
	pgx.Rows
	values [][]any
}

func (r *modelRows) Next() bool { return len(r.values) > 0 }

func (*modelRows) Err() error { return nil }

func (r *modelRows) FieldDescriptions() []pgconn.FieldDescription {
	if len(r.values) == 0 {
		return nil
	}
	return make([]pgconn.FieldDescription, len(r.values[0]))
}

func (*modelRows) Close() {}

func (r *modelRows) Scan(targets ...any) error {
	for i, value := range r.values[0] {
		switch target := targets[i].(type) {
		case *int64:
			*target = value.(int64)
		case **int64:
			*target = value.(*int64)
		case *[]int64:
			*target = value.([]int64)
		case *pgtype.FlatArray[pgtype.Int8]:
			*target = value.(pgtype.FlatArray[pgtype.Int8])
		}
	}
	r.values = r.values[1:]
	return nil
}

func (*modelRows) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }
