package doctor

import (
	"context"
	_ "embed"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/catalog"
	"github.com/pgratelimit/ratelimit/internal/lockholders"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// doctor reports values beyond these limits.
const (
	OldestVersion = 140000               // older versions get no more fixes
	LongTime      = 5 * time.Minute      // the maximum age of a transaction; autovacuum runs every minute
	failsafeAge   = int64(1_600_000_000) // at a greater age, Postgres hurries a VACUUM against wraparound
	fewUpdates    = 1000                 // with fewer updates, the share of HOT updates means little
	leastHOT      = 0.95
	FewDead       = 10_000 // dead rows
	LateVacuum    = 24 * time.Hour
	fillfactor    = 50       // the fillfactor in sql/tables.sql
	smallTable    = 10 << 20 // bytes; free space in a smaller table does not matter
	mostRoom      = 3        // the maximum size of a table, as a multiple of the size that its rows need
	mostExpired   = 0.5
	LongLock      = 5 * time.Second // how long a session may lock the limiter's tables
)

var (
	//go:embed sql/server.sql
	serverSQL string
	//go:embed sql/horizon.sql
	HorizonSQL string
	//go:embed sql/functions.sql
	functionsSQL string
	//go:embed sql/strangers.sql
	strangersSQL string
	//go:embed sql/ages.sql
	agesSQL string
	//go:embed sql/additions.sql
	additionsSQL string
	//go:embed sql/jit.sql
	jitSQL string
	//go:embed sql/locks.sql
	locksSQL string
)

// Examination has the data that the checks share.
type Examination struct {
	cli.DB // its Schema is the value of --schema

	Server Server

	Applied int64           // the number of the last migration, which CheckMigrations sets
	pooled  bool            // whether there is a pooler, which checkConnection sets
	told    bool            // whether CheckMigrations has found the last migration
	Found   catalog.Catalog // the objects in the schema, which CheckMigrations reads
}

// Server is the row of serverSQL. Names are quoted for SQL, except for Owner.
type Server struct {
	VersionNum   int
	Version      string
	Standby      bool
	TrackCounts  bool
	CountsHere   bool // whether track_counts is on for this database or role
	Autovacuum   bool
	FreezeMaxAge int64
	Standbys     int
	Database     string
	Role         string
	Schema       string   // the schema of the tables; "" if search_path has none
	Tables       int      // how many of the two tables for keys exist
	Usable       bool     // whether this role has USAGE on the schema
	Readable     bool     // whether this role may read both tables for keys
	Policies     *bool    // whether this role may read the policies; nil if the table is missing
	Changes      *bool    // whether this role may change the policies
	Owner        string   // the owner of the tables
	OwnerSQL     string   // Owner, quoted for SQL
	UsableIn     []string // other schemas that have tables with these names
	LockedIn     []string // schemas like UsableIn on which this role has no USAGE
}

func (s Server) hasTables() bool { return s.Tables == 2 && s.Usable }

func (e *Examination) ReadServer(ctx context.Context) error {
	rows, err := lookAt[Server](ctx, e, serverSQL)
	if err == nil {
		e.Server = rows[0]
	}
	return err
}

// name adds the schema to a name.
func (s Server) name(of string) string { return s.Schema + "." + of }

// lookAt returns the rows of a query. The query's columns must be in the order of the exported fields of T.
func lookAt[T any](ctx context.Context, e *Examination, sql string, args ...any) (all []T, err error) {
	err = e.Look(ctx, func(tx cli.Tx) error {
		all, err = cli.Rows[T](ctx, tx, sql, args...)
		return err
	})
	return all, err
}

// row runs a query that returns one row, and scans the row.
func (e *Examination) row(ctx context.Context, sql string, into ...any) error {
	return e.Look(ctx, func(tx cli.Tx) error { return tx.QueryRow(ctx, sql).Scan(into...) })
}

func (e *Examination) CheckServer(context.Context) (cli.Finding, error) {
	if e.Server.VersionNum < OldestVersion {
		return cli.Warning.Finding("upgrade the server", "PostgreSQL %s no longer gets fixes", e.Server.Version), nil
	}
	return cli.OK("PostgreSQL %s", e.Server.Version), nil
}

// checkConnection looks for a pooler. A pooler invents the process id that clients see. In transaction mode, two
// clients can get the same session of Postgres, one after the other.
func (e *Examination) checkConnection(ctx context.Context) (cli.Finding, error) {
	first, err := e.Pool.Acquire(ctx)
	if err != nil {
		return cli.Finding{}, err
	}
	defer first.Release()
	second, err := e.Pool.Acquire(ctx)
	if err != nil {
		return cli.Finding{}, err
	}
	defer second.Release()
	direct, shared := true, false
	last := map[uint32]*pgxpool.Conn{} // maps a session's process id to the last connection that used it
	for range 3 {
		for _, client := range []*pgxpool.Conn{first, second} {
			var pid uint32
			if err := client.QueryRow(ctx, "SELECT pg_catalog.pg_backend_pid()").Scan(&pid); err != nil {
				return cli.Finding{}, err
			}
			direct = direct && pid == client.Conn().PgConn().PID()
			shared = shared || last[pid] != nil && last[pid] != client
			last[pid] = client
		}
	}
	e.pooled = !direct
	given, err := e.Config()
	if err != nil {
		return cli.Finding{}, err
	}
	mode := given.ConnConfig.DefaultQueryExecMode
	name := strings.ReplaceAll(mode.String(), " ", "_") // the name in a connection string
	switch {
	case direct:
		return cli.OK("directly to Postgres"), nil
	case !shared:
		return cli.OK("through a pooler that keeps each client's session"), nil
	case mode == pgx.QueryExecModeExec || mode == pgx.QueryExecModeSimpleProtocol:
		return cli.OK("through a pooler in transaction mode, with default_query_exec_mode=%s; "+
			"migrate on a direct connection", name), nil
	}
	return cli.Warning.Finding("add default_query_exec_mode=exec to the connection string, "+
		"unless the pooler keeps prepared statements (PgBouncer 1.21 with max_prepared_statements); "+
		"and migrate on a direct connection",
		"through a pooler in transaction mode, with default_query_exec_mode=%s", name), nil
}

func (e *Examination) checkStandby(context.Context) (cli.Finding, error) {
	switch {
	case e.Server.Standby:
		return cli.Problem.Finding(
			"connect the application to the primary, for example with target_session_attrs=read-write",
			"this is a standby: nothing can be taken here, and the unlogged rate_limit_ephemeral cannot be read"), nil
	case e.Server.Standbys > 0:
		return cli.OK("%d connected; after a failover the unlogged rate_limit_ephemeral starts empty",
			e.Server.Standbys), nil
	}
	return cli.OK("none is connected"), nil
}

func (e *Examination) checkStatistics(context.Context) (cli.Finding, error) {
	var off, mend []string
	if !e.Server.TrackCounts {
		where := "SYSTEM"
		if e.Server.CountsHere {
			where = "DATABASE " + e.Server.Database
		}
		off, mend = append(off, "track_counts"), append(mend, "`ALTER "+where+" SET track_counts = on`")
	}
	if !e.Server.Autovacuum {
		off, mend = append(off, "autovacuum"), append(mend, "`ALTER SYSTEM SET autovacuum = on`")
	}
	if len(off) == 0 {
		return cli.OK("track_counts and autovacuum are on"), nil
	}
	verb := " is"
	if len(off) > 1 {
		verb = " are"
	}
	return cli.Problem.Finding("as a superuser: "+strings.Join(append(mend, "`SELECT pg_reload_conf()`"), ", "),
		"%s off, so autovacuum never comes: dead tuples stay, and transaction ids run out",
		strings.Join(off, " and ")+verb), nil
}

func (e *Examination) checkHorizon(ctx context.Context) (cli.Finding, error) {
	var seconds int64
	var what, mend *string
	var seesAll bool
	err := e.row(ctx, HorizonSQL, &seconds, &what, &mend, &seesAll)
	return JudgeHorizon(time.Duration(seconds)*time.Second, what, mend, seesAll), err
}

func JudgeHorizon(age time.Duration, what, mend *string, seesAll bool) cli.Finding {
	none, unseen := "none", ""
	if !seesAll {
		none, unseen = "this role has none", "; this role needs pg_read_all_stats to see those of other roles"
	}
	switch {
	case what == nil:
		return cli.OK("%s%s", none, unseen)
	case age < LongTime:
		return cli.OK("%s has the longest one, open for %v%s", cli.Printable(*what), age, unseen)
	}
	return cli.Warning.Finding(*mend,
		"%s has a transaction open for %v: until it ends, VACUUM removes no tuple that died later%s",
		cli.Printable(*what), age, unseen)
}

// IDAge is a row of agesSQL.
type IDAge struct {
	Kind, Database             string
	Age, Autovacuum, HolderAge int64
	Holder, Mend               string
}

// checkAges checks whether the server will soon refuse takes because it runs out of transaction ids.
func (e *Examination) checkAges(ctx context.Context) (cli.Finding, error) {
	ages, err := lookAt[IDAge](ctx, e, agesSQL)
	return JudgeAges(ages), err
}

func JudgeAges(ages []IDAge) cli.Finding {
	f := cli.OK("").ForAnybody()
	var found, mend []string
	for _, a := range ages {
		how, text := howOld(a.Age, a.Autovacuum)
		found = append(found, fmt.Sprintf("database %s has the oldest %s, %s", a.Database, a.Kind, text))
		if how == cli.Fine {
			continue
		}
		if f.Level != cli.Problem {
			f.Level = how
		}
		if a.HolderAge > a.Autovacuum {
			found[len(found)-1] += fmt.Sprintf(", and %s holds VACUUM back, for %d transactions",
				cli.Printable(a.Holder), a.HolderAge)
			mend = append(mend, "end what holds VACUUM back: "+cli.Printable(a.Mend))
		}
		mend = append(mend, "in database "+a.Database+", as a superuser, `VACUUM`")
	}
	f.Found, f.Do = strings.Join(found, "; "), strings.Join(slices.Compact(mend), "; then ")
	return f
}

// howOld returns the severity and a text for the age of the oldest ids in a table or database.
func howOld(age, autovacuum int64) (cli.Level, string) {
	switch {
	case age > failsafeAge:
		return cli.Problem, fmt.Sprintf("%d old; at 2,144,000,000 Postgres refuses statements that need a new one, "+
			"such as takes", age)
	case age > autovacuum+autovacuum/10:
		return cli.Warning, fmt.Sprintf("%d old, and autovacuum should have come at %d", age, autovacuum)
	}
	return cli.Fine, fmt.Sprintf("%d old; autovacuum comes at %d", age, autovacuum)
}

// foundFunction is a row of functionsSQL.
type foundFunction struct {
	Name           string
	Executable     bool // whether this role may execute the function
	Public         bool // whether every role may execute the function
	OwnerIsBlocked bool // whether the function's owner lacks rights on the tables that the function uses
	Nobodys        bool // whether only the function's owner may execute it, but this owner cannot log in
}

func (e *Examination) checkRights(ctx context.Context) (cli.Finding, error) {
	found, err := lookAt[foundFunction](ctx, e, functionsSQL)
	return e.Server.judgeRights(found), err
}

func (s Server) judgeRights(found []foundFunction) cli.Finding {
	var blocked, public, missing, nobodys []string
	calls, sweeps := 0, false
	for _, f := range found {
		if f.OwnerIsBlocked {
			blocked = append(blocked, f.Name)
		}
		if f.Public && f.Name != "rate_limit_version" {
			public = append(public, s.name(f.Name))
		}
		takes, sweep := slices.Contains(algorithm.Functions(), f.Name), f.Name == "rate_limit_sweep"
		if f.Nobodys && (takes || sweep) {
			nobodys = append(nobodys, f.Name)
		}
		switch {
		case takes && f.Executable:
			calls++
		case takes:
			missing = append(missing, s.name(f.Name))
		case sweep:
			sweeps = f.Executable
		}
	}
	grant := fmt.Sprintf("`GRANT EXECUTE ON FUNCTION %s TO %s`, or with the roles of deploy/roles.sql, "+
		"run deploy/grants.sql again", strings.Join(missing, ", "), s.Role)
	switch {
	case len(blocked) > 0:
		return cli.Problem.Finding(fmt.Sprintf("`GRANT USAGE ON SCHEMA %s TO %s`, "+
			"`GRANT SELECT, INSERT, UPDATE, DELETE ON %[3]s, %[4]s, %[3]s_hold, %[4]s_hold TO %[2]s`",
			s.Schema, s.OwnerSQL, s.name(cli.Table(false)), s.name(cli.Table(true))),
			"the functions run with the rights of their owner, and it may not use the tables: %s",
			strings.Join(blocked, ", "))
	case len(public) > 0:
		return cli.Warning.Finding(fmt.Sprintf("`REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC`, "+
			"and grant it to the roles that need it", strings.Join(public, ", ")),
			"every role may execute %s", strings.Join(public, ", "))
	case len(nobodys) >= len(algorithm.Functions()): // the grants were forgotten
		return cli.Problem.Finding("grant EXECUTE on them, as deploy/grants.sql does after each migration",
			"only their owner may execute %s, and cannot log in", strings.Join(nobodys, ", "))
	case len(missing) == 0:
		return cli.OK("this role may execute the functions, and not everybody may")
	case calls > 0:
		return cli.Warning.Finding("if it is the application's role, "+grant, "this role may not execute %s",
			strings.Join(missing, ", "))
	case sweeps:
		return cli.OK("this role may sweep, and not take, as the sweeper of deploy/roles.sql")
	case s.Changes != nil && *s.Changes:
		return cli.OK("this role may change policies, and not take, as the policy admin of deploy/roles.sql")
	case s.Readable:
		return cli.OK("this role may read the tables, and not take, as the reader of deploy/roles.sql")
	}
	return cli.Problem.Finding("if it is the application's role, "+grant,
		"this role may neither execute the functions nor read the tables")
}

// checkStrangers looks for roles that could replace the limiter's objects.
func (e *Examination) checkStrangers(ctx context.Context) (cli.Finding, error) {
	all, err := lookAt[struct{ Found, Mend string }](ctx, e, strangersSQL)
	if err != nil || len(all) == 0 {
		return cli.OK("only the owner may create in schema %s, and owns all objects there that have our names",
			e.Server.Schema), err
	}
	var found, mend []string
	for _, s := range all {
		found, mend = append(found, s.Found), append(mend, s.Mend)
	}
	return cli.Problem.Finding(cli.Printable(strings.Join(mend, "; ")),
		"whoever calls the functions may run code of others, with the caller's rights: %s",
		cli.Printable(strings.Join(found, ", "))), nil
}

// checkAdditions looks for objects that platforms and operators add to every table.
func (e *Examination) checkAdditions(ctx context.Context) (cli.Finding, error) {
	f := cli.OK("nothing that platforms add to every table")
	all, err := lookAt[struct {
		Level       cli.Level
		Found, Mend string
	}](ctx, e, additionsSQL)
	var found, mend []string
	for _, a := range all {
		if f.Level == cli.Fine || a.Level == cli.Problem {
			f.Level = a.Level
		}
		found = append(found, a.Found)
		if a.Mend != "" {
			mend = append(mend, a.Mend)
		}
	}
	if len(found) > 0 {
		f.Found, f.Do = cli.Printable(strings.Join(found, "; ")), cli.Printable(strings.Join(mend, "; "))
	}
	return f, err
}

func (e *Examination) checkJIT(ctx context.Context) (cli.Finding, error) {
	var compiles bool
	var above float64
	if err := e.row(ctx, jitSQL, &compiles, &above); err != nil || !compiles {
		return cli.OK("the statements that call the functions are not compiled"), err
	}
	return cli.Warning.Finding("`ALTER ROLE "+e.Server.Role+" SET jit = off`, if it is the application's role, "+
		"or raise jit_above_cost",
		"with jit_above_cost = %v, Postgres compiles the statement of each call, for 10 ms to seconds", above).
		ForAnybody(), nil
}

// LockHolder is a row of locksSQL.
type LockHolder struct {
	lockholders.Holder

	What    string
	Closed  bool // whether no other session can read the table
	Stopped bool // whether no other session can write to the table
}

// ReadLocks returns the sessions that have locked the limiter's tables for at least the argument since. ReadLocks does
// not wait for these sessions.
func (e *Examination) ReadLocks(ctx context.Context, since time.Duration) (held []LockHolder, err error) {
	options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly}
	err = pgx.BeginTxFunc(ctx, e.Pool, options, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL jit = off"); err != nil { // all statements of the command run without JIT
			return err
		}
		var schema string
		if err := tx.QueryRow(ctx, cli.SessionSQL, strconv.FormatInt(e.Timeout.Milliseconds(), 10), e.Schema).Scan(
			&schema, nil, nil, nil, nil, nil, nil); err != nil {
			return err
		}
		held, err = cli.Rows[LockHolder](ctx, tx, locksSQL, schema, since.Seconds(), lockholders.Migrations)
		return err
	})
	return held, err
}

// checkLocks looks for locks on the limiter's tables. checkLocks comes first, because other checks would wait for a
// lock.
func (e *Examination) checkLocks(ctx context.Context) (f cli.Finding, closed bool, err error) {
	held, err := e.ReadLocks(ctx, LongLock)
	f = JudgeLocks(held)
	err = could(err, &f)
	f.Check = "locks"
	if closed = slices.ContainsFunc(held, func(h LockHolder) bool { return h.Closed }); closed {
		f.Do += "; then run this again, because nothing else could be looked at"
	}
	return f, closed, err
}

func JudgeLocks(held []LockHolder) cli.Finding {
	var found, ends []string
	worst := cli.Warning
	for _, h := range held {
		found = append(found, h.String()+" has "+h.What)
		ends = append(ends, "`"+h.End()+"`")
		if h.Closed || h.Stopped {
			worst = cli.Problem
		}
	}
	if len(held) == 0 {
		return cli.OK("nobody has had one on the tables for longer than %v", LongLock)
	}
	effect := "migrations wait for that, and calls for rows that it has written"
	if worst == cli.Problem {
		effect = "calls fail meanwhile"
	}
	return worst.Finding("let it end, or end it as its role or a superuser, which rolls back what it has not "+
		"committed: "+strings.Join(ends, ", "), "%s: %s", effect, strings.Join(found, "; ")).ForAnybody()
}
