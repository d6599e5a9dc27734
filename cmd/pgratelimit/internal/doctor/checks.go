package doctor

import (
	"context"
	_ "embed"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/catalog"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// These are the limits from which on the doctor says something.
const (
	OldestVersion = 140000               // older ones get no more fixes
	LongTime      = 5 * time.Minute      // of a transaction; autovacuum comes every minute
	failsafeAge   = int64(1_600_000_000) // where Postgres 14 and later rush a VACUUM against wraparound
	fewUpdates    = 1000                 // below, too few to tell a share
	leastHOT      = 0.95
	FewDead       = 10_000 // rows
	LateVacuum    = 24 * time.Hour
	fillfactor    = 50       // of sql/tables.sql
	smallTable    = 10 << 20 // bytes; below, free space does not matter
	mostRoom      = 3        // times what the rows need
	mostExpired   = 0.5
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
)

// Examination is what the checks share.
type Examination struct {
	App    *cli.App
	Pool   *pgxpool.Pool
	Server Server

	Applied int64           // the last migration; set by checkMigrations
	pooled  bool            // through a pooler; set by checkConnection
	told    bool            // checkMigrations could find out which it is
	Found   catalog.Catalog // set by checkMigrations
}

// Server is what serverSQL tells. Names are quoted as SQL needs it, but for that of the owner.
type Server struct {
	VersionNum   int
	version      string
	standby      bool
	trackCounts  bool
	countsHere   bool // track_counts was set for this database or role
	autovacuum   bool
	freezeMaxAge int64
	standbys     int
	database     string
	role         string
	Schema       string   // of the tables; empty if search_path leads to none
	Tables       int      // how many of the two there are
	usable       bool     // this role has USAGE on their schema
	readable     bool     // this role may read both
	policies     *bool    // this role may read the policies; nil if there is no table of them
	changes      *bool    // this role may change them
	Owner        string   // of the tables, as it is
	OwnerSQL     string   // the same, quoted
	usableIn     []string // schemas that have tables of these names
	lockedIn     []string // the same without USAGE
}

func (s Server) hasTables() bool { return s.Tables == 2 && s.usable }

func (e *Examination) ReadServer(ctx context.Context) error {
	s := &e.Server
	return e.row(ctx, serverSQL, &s.VersionNum, &s.version, &s.standby, &s.trackCounts, &s.countsHere, &s.autovacuum,
		&s.freezeMaxAge, &s.standbys, &s.database, &s.role, &s.Schema, &s.Tables, &s.usable, &s.readable, &s.policies,
		&s.changes, &s.Owner, &s.OwnerSQL, &s.usableIn, &s.lockedIn)
}

// name is a name of ours in SQL.
func (s Server) name(of string) string { return s.Schema + "." + of }

// row reads the only row of a query.
func (e *Examination) row(ctx context.Context, sql string, into ...any) error {
	return e.App.Look(ctx, e.Pool, func(tx pgx.Tx) error { return tx.QueryRow(ctx, sql).Scan(into...) })
}

func (e *Examination) CheckServer(context.Context) (cli.Finding, error) {
	if e.Server.VersionNum < OldestVersion {
		return cli.Warning.Finding("upgrade the server", "PostgreSQL %s no longer gets fixes", e.Server.version), nil
	}
	return cli.OK("PostgreSQL %s", e.Server.version), nil
}

// checkConnection looks for a pooler. A pooler tells each client a process id that it has made up. In transaction
// mode, two clients that take turns get the same session of Postgres.
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
	last := map[uint32]*pgxpool.Conn{} // by process id, the client that had the session last
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
	given, err := e.App.Config()
	if err != nil {
		return cli.Finding{}, err
	}
	mode := given.ConnConfig.DefaultQueryExecMode
	name := strings.ReplaceAll(mode.String(), " ", "_") // as it is written in a connection string
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
	case e.Server.standby:
		return cli.Problem.Finding(
			"connect the application to the primary, for example with target_session_attrs=read-write",
			"this is a standby: nothing can be taken here, "+
				"and rate_limit_ephemeral, which is unlogged, cannot even be read"), nil
	case e.Server.standbys > 0:
		return cli.OK("%d connected; after a failover rate_limit_ephemeral, which is unlogged, starts empty",
			e.Server.standbys), nil
	}
	return cli.OK("none is connected"), nil
}

func (e *Examination) checkStatistics(context.Context) (cli.Finding, error) {
	var off, mend []string
	if !e.Server.trackCounts {
		off = append(off, "track_counts")
		if e.Server.countsHere {
			mend = append(mend, "`ALTER DATABASE "+e.Server.database+" SET track_counts = on`")
		} else {
			mend = append(mend, "`ALTER SYSTEM SET track_counts = on`")
		}
	}
	if !e.Server.autovacuum {
		off, mend = append(off, "autovacuum"), append(mend, "`ALTER SYSTEM SET autovacuum = on`")
	}
	if len(off) > 0 {
		return cli.Problem.Finding("as a superuser: "+strings.Join(append(mend, "`SELECT pg_reload_conf()`"), ", "),
			"%s off, so autovacuum never comes: dead tuples stay, and transaction ids run out",
			map[int]string{1: off[0] + " is", 2: "track_counts and autovacuum are"}[len(off)]), nil
	}
	return cli.OK("track_counts and autovacuum are on"), nil
}

func (e *Examination) checkHorizon(ctx context.Context) (cli.Finding, error) {
	var seconds int64
	var what, mend *string
	var seesAll bool
	if err := e.row(ctx, HorizonSQL, &seconds, &what, &mend, &seesAll); err != nil {
		return cli.Finding{}, err
	}
	return JudgeHorizon(time.Duration(seconds)*time.Second, what, mend, seesAll), nil
}

func JudgeHorizon(age time.Duration, what, mend *string, seesAll bool) cli.Finding {
	none, unseen := "none", ""
	if !seesAll {
		none, unseen = "none of this role's", "; those of other roles cannot be seen without pg_read_all_stats"
	}
	switch {
	case what == nil:
		return cli.OK("%s%s", none, unseen)
	case age < LongTime:
		return cli.OK("the longest, of %s, has been open for %v%s", cli.Printable(*what), age, unseen)
	}
	return cli.Warning.Finding(*mend,
		"%s has a transaction open for %v: until it ends, VACUUM removes no tuple that died since%s",
		cli.Printable(*what), age, unseen)
}

// IDAge is a row of agesSQL.
type IDAge struct {
	kind, database  string
	age, autovacuum int64
	holderAge       int64
	holder, mend    string
}

// checkAges looks at what makes the server refuse every take.
func (e *Examination) checkAges(ctx context.Context) (cli.Finding, error) {
	var ages []IDAge
	err := e.App.Look(ctx, e.Pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, agesSQL)
		if err != nil {
			return err
		}
		ages, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (a IDAge, err error) {
			return a, row.Scan(&a.kind, &a.database, &a.age, &a.autovacuum, &a.holderAge, &a.holder, &a.mend)
		})
		return err
	})
	return JudgeAges(ages), err
}

func JudgeAges(ages []IDAge) cli.Finding {
	f := cli.OK("")
	f.Anybody = true
	var found, mend []string
	for _, a := range ages {
		how, text := howOld(a.age, a.autovacuum)
		found = append(found, fmt.Sprintf("the oldest %s are those of database %s, %s", a.kind, a.database, text))
		if how == cli.Fine {
			continue
		}
		if f.Level != cli.Problem {
			f.Level = how
		}
		if a.holderAge > a.autovacuum {
			found[len(found)-1] += fmt.Sprintf(", and %s holds VACUUM back, for %d transactions",
				cli.Printable(a.holder), a.holderAge)
			mend = append(mend, "end what holds VACUUM back: "+cli.Printable(a.mend))
		}
		mend = append(mend, "in database "+a.database+", as a superuser, `VACUUM`")
	}
	f.Found, f.Do = strings.Join(found, "; "), strings.Join(slices.Compact(mend), "; then ")
	return f
}

// howOld judges the age of the oldest ids of a table or a database.
func howOld(age, autovacuum int64) (cli.Level, string) {
	switch {
	case age > failsafeAge:
		return cli.Problem, fmt.Sprintf("%d old; at 2,144,000,000 Postgres refuses whatever needs a new one, "+
			"as every take does", age)
	case age > autovacuum+autovacuum/10:
		return cli.Warning, fmt.Sprintf("%d old, and autovacuum should have come at %d", age, autovacuum)
	}
	return cli.Fine, fmt.Sprintf("%d old; autovacuum comes at %d", age, autovacuum)
}

// foundFunction is a row of functionsSQL.
type foundFunction struct {
	name           string
	executable     bool // by this role
	public         bool // everybody may execute it
	ownerIsBlocked bool // its owner lacks the rights for what it does with the tables
	nobodys        bool // only its owner may execute it, who cannot log in
}

func (e *Examination) checkRights(ctx context.Context) (cli.Finding, error) {
	var found []foundFunction
	err := e.App.Look(ctx, e.Pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, functionsSQL)
		if err != nil {
			return err
		}
		found, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (f foundFunction, err error) {
			return f, row.Scan(&f.name, &f.executable, &f.public, &f.ownerIsBlocked, &f.nobodys)
		})
		return err
	})
	return e.Server.judgeRights(found), err
}

func (s Server) judgeRights(found []foundFunction) cli.Finding {
	var blocked, public, missing, nobodys []string
	calls, sweeps := 0, false
	for _, f := range found {
		if f.ownerIsBlocked {
			blocked = append(blocked, f.name)
		}
		if f.public && f.name != "rate_limit_version" {
			public = append(public, s.name(f.name))
		}
		if f.nobodys && (slices.Contains(algorithm.Functions(), f.name) || f.name == "rate_limit_sweep") {
			nobodys = append(nobodys, f.name)
		}
		switch {
		case slices.Contains(algorithm.Functions(), f.name) && f.executable:
			calls++
		case slices.Contains(algorithm.Functions(), f.name):
			missing = append(missing, s.name(f.name))
		case f.name == "rate_limit_sweep":
			sweeps = f.executable
		}
	}
	grant := fmt.Sprintf("`GRANT EXECUTE ON FUNCTION %s TO %s`, or with the roles of deploy/roles.sql, "+
		"run deploy/grants.sql again", strings.Join(missing, ", "), s.role)
	switch {
	case len(blocked) > 0:
		return cli.Problem.Finding(fmt.Sprintf("`GRANT USAGE ON SCHEMA %s TO %s`, "+
			"`GRANT SELECT, INSERT, UPDATE, DELETE ON %s, %s TO %s`",
			s.Schema, s.OwnerSQL, s.name(cli.Table(false)), s.name(cli.Table(true)), s.OwnerSQL),
			"the functions run with the rights of their owner, who may not use the tables: %s",
			strings.Join(blocked, ", "))
	case len(public) > 0:
		return cli.Warning.Finding(fmt.Sprintf("`REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC`, "+
			"and grant it to the roles that need it", strings.Join(public, ", ")),
			"every role may execute %s", strings.Join(public, ", "))
	case len(nobodys) >= len(algorithm.Functions()): // somebody has forgotten them all
		return cli.Problem.Finding("grant EXECUTE on them, as deploy/grants.sql does after each migration",
			"only their owner, who cannot log in, may execute %s", strings.Join(nobodys, ", "))
	case len(missing) == 0:
		return cli.OK("this role may execute the functions, and not everybody may")
	case calls > 0:
		return cli.Warning.Finding("if it is the application's role, "+grant, "this role may not execute %s",
			strings.Join(missing, ", "))
	case sweeps:
		return cli.OK("this role may sweep, and not take, as the sweeper of deploy/roles.sql")
	case s.changes != nil && *s.changes:
		return cli.OK("this role may change policies, and not take, as the policy admin of deploy/roles.sql")
	case s.readable:
		return cli.OK("this role may read the tables, and not take, as the reader of deploy/roles.sql")
	}
	return cli.Problem.Finding("if it is the application's role, "+grant,
		"this role may neither execute the functions nor read the tables")
}

// checkStrangers looks for roles that could put something in the place of what is ours.
func (e *Examination) checkStrangers(ctx context.Context) (cli.Finding, error) {
	var found, mend []string
	err := e.App.Look(ctx, e.Pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, strangersSQL)
		if err != nil {
			return err
		}
		var what, do string
		_, err = pgx.ForEachRow(rows, []any{&what, &do}, func() error {
			found, mend = append(found, what), append(mend, do)
			return nil
		})
		return err
	})
	if err != nil || len(found) == 0 {
		return cli.OK("nobody but the owner may create in schema %s, and all in it that has our names is the owner's",
			e.Server.Schema), err
	}
	return cli.Problem.Finding(cli.Printable(strings.Join(mend, "; ")),
		"what others make there can be run by whoever calls the functions, with their rights: %s",
		cli.Printable(strings.Join(found, ", "))), nil
}

// checkAdditions looks at what platforms and operators add to every table.
func (e *Examination) checkAdditions(ctx context.Context) (cli.Finding, error) {
	f := cli.OK("nothing that platforms add to every table")
	err := e.App.Look(ctx, e.Pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, additionsSQL)
		if err != nil {
			return err
		}
		var found, mend []string
		var how cli.Level
		var what, do string
		_, err = pgx.ForEachRow(rows, []any{&how, &what, &do}, func() error {
			if f.Level == cli.Fine || how == cli.Problem {
				f.Level = how
			}
			found = append(found, what)
			if do != "" {
				mend = append(mend, do)
			}
			return nil
		})
		if len(found) > 0 {
			f.Found, f.Do = cli.Printable(strings.Join(found, "; ")), cli.Printable(strings.Join(mend, "; "))
		}
		return err
	})
	return f, err
}

func (e *Examination) checkJIT(ctx context.Context) (cli.Finding, error) {
	var compiles bool
	var above float64
	if err := e.row(ctx, jitSQL, &compiles, &above); err != nil {
		return cli.Finding{}, err
	}
	if compiles {
		f := cli.Warning.Finding("`ALTER ROLE "+e.Server.role+" SET jit = off`, if it is the application's role, "+
			"or raise jit_above_cost",
			"with jit_above_cost = %v, Postgres compiles the statement of each call, "+
				"which takes it 10 ms to seconds", above)
		f.Anybody = true
		return f, nil
	}
	return cli.OK("the statements that call the functions are not compiled"), nil
}
