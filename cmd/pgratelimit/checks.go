package main

import (
	"context"
	_ "embed"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/migrations"
)

// From where on the doctor says something.
const (
	oldestVersion = 140000               // older ones get no more fixes
	longTime      = 5 * time.Minute      // of a transaction; autovacuum comes every minute
	failsafeAge   = int64(1_600_000_000) // where Postgres 14 and later drop everything else for a VACUUM against wraparound
	fewUpdates    = 1000                 // too few to tell a share
	leastHOT      = 0.95
	fewDead       = 10_000 // rows
	lateVacuum    = 24 * time.Hour
	smallTable    = 10 << 20 // bytes; below, free space is no matter
	leastFull     = 0.5
	mostExpired   = 0.5
)

var (
	//go:embed sql/doctor/server.sql
	serverSQL string
	//go:embed sql/doctor/horizon.sql
	horizonSQL string
	//go:embed sql/doctor/functions.sql
	functionsSQL string
	//go:embed sql/doctor/strangers.sql
	strangersSQL string
	//go:embed sql/doctor/tables.sql
	tablesSQL string
	//go:embed sql/doctor/sample.sql
	sampleSQL string
)

// examination is what the checks share.
type examination struct {
	app    *app
	pool   *pgxpool.Pool
	server server

	expected map[string]function // set by checkMigrations
	newer    bool                // the database is of a newer version than this command
	found    []foundFunction     // set by checkFunctions
}

// server is what serverSQL tells.
type server struct {
	versionNum   int
	version      string
	standby      bool
	trackCounts  bool
	autovacuum   bool
	freezeMaxAge int64
	standbys     int
	hasTables    bool
	schema       string // of the tables, quoted
}

func (e *examination) readServer(ctx context.Context) error {
	s := &e.server
	return e.row(ctx, serverSQL, &s.versionNum, &s.version, &s.standby, &s.trackCounts, &s.autovacuum, &s.freezeMaxAge,
		&s.standbys, &s.hasTables, &s.schema)
}

// row reads the only row of a query.
func (e *examination) row(ctx context.Context, sql string, into ...any) error {
	return e.app.look(ctx, e.pool, func(tx pgx.Tx) error { return tx.QueryRow(ctx, sql).Scan(into...) })
}

func (e *examination) checkServer(context.Context) (finding, error) {
	if e.server.versionNum < oldestVersion {
		return warning.finding("upgrade it", "PostgreSQL %s no longer gets fixes", e.server.version), nil
	}
	return ok("PostgreSQL %s", e.server.version), nil
}

// checkConnection looks for a pooler. To each of its clients that tells a process id of its own making; and in transaction mode
// two clients that take turns get the same session of Postgres.
func (e *examination) checkConnection(ctx context.Context) (finding, error) {
	first, err := e.pool.Acquire(ctx)
	if err != nil {
		return finding{}, err
	}
	defer first.Release()
	second, err := e.pool.Acquire(ctx)
	if err != nil {
		return finding{}, err
	}
	defer second.Release()
	direct, shared := true, false
	last := map[uint32]*pgxpool.Conn{} // who had a session last
	for range 3 {
		for _, client := range []*pgxpool.Conn{first, second} {
			var pid uint32
			if err := client.QueryRow(ctx, "SELECT pg_catalog.pg_backend_pid()").Scan(&pid); err != nil {
				return finding{}, err
			}
			direct = direct && pid == client.Conn().PgConn().PID()
			shared = shared || last[pid] != nil && last[pid] != client
			last[pid] = client
		}
	}
	given, err := pgx.ParseConfig(e.app.databaseURL)
	if err != nil {
		return finding{}, err
	}
	mode := given.DefaultQueryExecMode
	name := strings.ReplaceAll(mode.String(), " ", "_") // as it is written in a connection string
	switch {
	case direct:
		return ok("directly to Postgres"), nil
	case !shared:
		return ok("through a pooler that keeps each client's session"), nil
	case mode == pgx.QueryExecModeExec || mode == pgx.QueryExecModeSimpleProtocol:
		return ok("through a pooler in transaction mode, with default_query_exec_mode=%s; migrate on a direct connection", name), nil
	}
	return warning.finding("add default_query_exec_mode=exec to the connection string, unless the pooler keeps prepared statements "+
		"(PgBouncer 1.21 with max_prepared_statements); and migrate on a direct connection",
		"through a pooler in transaction mode, with default_query_exec_mode=%s", name), nil
}

func (e *examination) checkStandby(context.Context) (finding, error) {
	switch {
	case e.server.standby:
		return problem.finding("connect the application to the primary, for example with target_session_attrs=read-write",
			"this is a standby: nothing can be taken here, and rate_limit_ephemeral, which is unlogged, cannot even be read"), nil
	case e.server.standbys > 0:
		return ok("%d connected; after a failover rate_limit_ephemeral, which is unlogged, starts empty", e.server.standbys), nil
	}
	return ok("none is connected"), nil
}

func (e *examination) checkStatistics(context.Context) (finding, error) {
	if !e.server.trackCounts {
		return problem.finding("set track_counts = on", "track_counts is off, so autovacuum never comes"), nil
	}
	if !e.server.autovacuum {
		return problem.finding("set autovacuum = on", "autovacuum is off, so dead tuples stay and transaction ids run out"), nil
	}
	return ok("track_counts and autovacuum are on"), nil
}

func (e *examination) checkHorizon(ctx context.Context) (finding, error) {
	var seconds int64
	var what, mend *string
	var seesAll bool
	if err := e.row(ctx, horizonSQL, &seconds, &what, &mend, &seesAll); err != nil {
		return finding{}, err
	}
	return judgeHorizon(time.Duration(seconds)*time.Second, what, mend, seesAll), nil
}

func judgeHorizon(age time.Duration, what, mend *string, seesAll bool) finding {
	unseen := ""
	if !seesAll {
		unseen = "; those of other roles cannot be seen without pg_read_all_stats"
	}
	switch {
	case what == nil:
		return ok("none%s", unseen)
	case age < longTime:
		return ok("the longest, of %s, has been open for %v%s", printable(*what), age, unseen)
	}
	return warning.finding(*mend, "%s has a transaction open for %v: until it ends, VACUUM removes no tuple that died since%s",
		printable(*what), age, unseen)
}

// checkMigrations also finds out which functions are to be expected.
func (e *examination) checkMigrations(ctx context.Context) (finding, error) {
	all, err := readMigrations()
	if err != nil {
		return finding{}, err
	}
	pool, err := e.app.open(ctx, e.app.inSchema)
	if err != nil {
		return finding{}, err
	}
	defer pool.Close()
	latest := all[len(all)-1].Version
	e.expected = expectedFunctions(all, latest)
	status, err := migrations.Status(ctx, pool)
	if err != nil && !e.server.hasTables {
		return problem.finding("say with --schema where the tables are", "%s", oneLine(err)), ctx.Err()
	}
	if err != nil {
		return finding{}, err
	}
	var applied int64
	var pending []string
	for _, migration := range status {
		if migration.Applied {
			applied = max(applied, migration.Version)
		} else {
			pending = append(pending, fmt.Sprintf("%d %s", migration.Version, migration.Name))
		}
	}
	const up = "run 'pgratelimit migrate up'"
	switch {
	case !e.server.hasTables:
		return problem.finding(up+", or say with --schema where they are", "the tables are not there"), nil
	case applied == 0:
		return ok("the tables are there, and were made by another tool than 'pgratelimit migrate'"), nil
	case applied > latest:
		e.newer = true
		return ok("at version %d, of a newer release than this command", applied), nil
	}
	e.expected = expectedFunctions(all, applied)
	if len(pending) > 0 {
		return problem.finding(up, "not applied: %s", strings.Join(pending, ", ")), nil
	}
	return ok("up to date, at version %d in schema %s", applied, e.server.schema), nil
}

// foundFunction is a row of functionsSQL.
type foundFunction struct {
	name           string
	function       function
	pinned         bool // its settings are fixed
	notCallable    bool // the role may not execute it, and applications call it
	public         bool // everybody may execute it
	ownerIsBlocked bool // its owner may not do with the tables what it does
}

func (e *examination) checkFunctions(ctx context.Context) (finding, error) {
	err := e.app.look(ctx, e.pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, functionsSQL, callable(e.expected))
		if err != nil {
			return err
		}
		e.found, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (f foundFunction, err error) {
			err = row.Scan(&f.name, &f.function.body, &f.function.definer, &f.pinned, &f.notCallable, &f.public, &f.ownerIsBlocked)
			return f, err
		})
		return err
	})
	if err != nil || e.newer {
		return ok("of a newer release than this command, which cannot tell whether they are right"), err
	}
	for name, function := range e.expected {
		function.body = e.inSchema(function.body)
		e.expected[name] = function
	}
	return judgeFunctions(e.expected, e.found), nil
}

// inSchema writes our names with their schema, as access.sql does.
func (e *examination) inSchema(body string) string {
	return strings.ReplaceAll(body, "rate_limit_", e.server.schema+".rate_limit_")
}

func judgeFunctions(expected map[string]function, found []foundFunction) finding {
	var wrong []string
	for name, want := range expected {
		same := func(f foundFunction) bool {
			return f.name == name && f.function == want && (f.pinned || !want.definer)
		}
		switch {
		case slices.ContainsFunc(found, same):
		case slices.ContainsFunc(found, func(f foundFunction) bool { return f.name == name }):
			wrong = append(wrong, name+" was changed")
		default:
			wrong = append(wrong, name+" is missing")
		}
	}
	if len(wrong) > 0 {
		slices.Sort(wrong)
		return problem.finding("run the SQL of 'pgratelimit migrate print' for them again, with CREATE OR REPLACE; or, if the counts may go, "+
			"'pgratelimit migrate down --to 0' and 'up'", "not what the migrations made: %s", strings.Join(wrong, ", "))
	}
	return ok("the %d that the migrations made, unchanged", len(expected))
}

func (e *examination) checkRights(context.Context) (finding, error) { return judgeRights(e.found), nil }

// checkStrangers looks for those who could put something in the place of what is ours.
func (e *examination) checkStrangers(ctx context.Context) (finding, error) {
	var found, mend []string
	err := e.app.look(ctx, e.pool, func(tx pgx.Tx) error {
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
		return ok("nobody but the owner may create in schema %s, and all in it that has our names is the owner's", e.server.schema), err
	}
	return problem.finding(printable(strings.Join(mend, "; ")),
		"what others make there can be run by whoever calls the functions, with their rights: %s", printable(strings.Join(found, ", "))), nil
}

func judgeRights(found []foundFunction) finding {
	var blocked, public, notCallable []string
	for _, f := range found {
		if f.ownerIsBlocked {
			blocked = append(blocked, f.name)
		}
		if f.public && f.name != "rate_limit_version" {
			public = append(public, f.name)
		}
		if f.notCallable {
			notCallable = append(notCallable, f.name)
		}
	}
	switch {
	case len(blocked) > 0:
		return problem.finding("GRANT SELECT, INSERT, UPDATE, DELETE on both tables, and USAGE on their schema, to the owner of the functions",
			"the functions run with the rights of their owner, who may not use the tables: %s", strings.Join(blocked, ", "))
	case len(public) > 0:
		return warning.finding("REVOKE ALL ON FUNCTION … FROM PUBLIC, and GRANT EXECUTE to the roles that need it",
			"every role may execute %s", strings.Join(public, ", "))
	case len(notCallable) > 0:
		return warning.finding("if it is the application's role, GRANT EXECUTE, as in deploy/grants.sql",
			"this role may not execute %s", strings.Join(notCallable, ", "))
	}
	return ok("this role may execute the functions, and not everybody may")
}

// tableHealth is a row of tablesSQL, and what a sample tells.
type tableHealth struct {
	name          string
	persistence   string
	bytes         int64
	live, dead    int64
	updated, hot  int64
	vacuumed      *time.Time
	now           time.Time
	xidAge        int64
	autovacuum    bool
	otherIndexes  []string
	sampledBytes  float64 // of the table's size
	sampledRows   int64
	sampledLive   int64
	sampledFilled int64 // bytes
}

// checkTables has a few findings for each table.
func (e *examination) checkTables(ctx context.Context) ([]finding, error) {
	var tables []tableHealth
	err := e.app.look(ctx, e.pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, tablesSQL)
		if err != nil {
			return err
		}
		tables, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (t tableHealth, err error) {
			err = row.Scan(&t.name, &t.persistence, &t.bytes, &t.live, &t.dead, &t.updated, &t.hot, &t.vacuumed, &t.now, &t.xidAge,
				&t.autovacuum, &t.otherIndexes)
			return t, err
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	var sampling finding
	sampleErr := e.sample(ctx, tables)
	if err := could(sampleErr, &sampling); err != nil {
		return nil, err
	}
	var findings []finding
	for _, t := range tables {
		checks := []struct {
			name  string
			judge func() finding
		}{
			{"kind", t.judgeKind},
			{"HOT updates", t.judgeHOT},
			{"dead tuples", t.judgeDead},
			{"autovacuum", t.judgeVacuum},
			{"transaction ids", func() finding { return t.judgeAge(e.server.freezeMaxAge) }},
			{"bloat", t.judgeBloat},
			{"sweeping", t.judgeSweeping},
		}
		for _, check := range checks {
			f := sampling
			if sampleErr == nil || check.name != "bloat" && check.name != "sweeping" {
				f = check.judge()
			}
			f.Check = t.name + ": " + check.name
			findings = append(findings, f)
		}
	}
	return findings, nil
}

func (e *examination) sample(ctx context.Context, tables []tableHealth) error {
	percent := map[string]float64{}
	for i := range tables {
		share := sampleShare(tables[i].bytes)
		tables[i].sampledBytes = share * float64(tables[i].bytes)
		percent[tables[i].name] = 100 * share
	}
	return e.app.look(ctx, e.pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, sampleSQL, percent[table(false)], percent[table(true)])
		if err != nil {
			return err
		}
		var name string
		var all, live, filled int64
		_, err = pgx.ForEachRow(rows, []any{&name, &all, &live, &filled}, func() error {
			for i := range tables {
				if t := &tables[i]; t.name == name {
					t.sampledRows, t.sampledLive, t.sampledFilled = all, live, filled
				}
			}
			return nil
		})
		return err
	})
}

func (t tableHealth) judgeKind() finding {
	want, kinds := "u", map[string]string{"u": "unlogged", "p": "logged", "t": "temporary"}
	if t.name == table(true) {
		want = "p"
	}
	switch {
	case t.persistence != want:
		return warning.finding(fmt.Sprintf("ALTER TABLE %s SET %s", t.name, strings.ToUpper(kinds[want])),
			"it is %s, and the migrations made it %s", kinds[t.persistence], kinds[want])
	case len(t.otherIndexes) > 0:
		return problem.finding("DROP INDEX "+strings.Join(t.otherIndexes, ", "),
			"it has an index besides its primary key, so updates that change the index's columns are not HOT, and the table bloats")
	}
	return ok("%s, with no index but the primary key", kinds[want])
}

func (t tableHealth) judgeHOT() finding {
	if t.updated < fewUpdates {
		return ok("%d updates so far, too few to tell", t.updated)
	}
	share := float64(t.hot) / float64(t.updated)
	if share < leastHOT {
		return warning.finding("look for long transactions and further indexes, and whether autovacuum keeps up",
			"%.1f %% of %d updates were HOT; the others write the index too", 100*share, t.updated)
	}
	return ok("%.1f %% of %d updates", 100*share, t.updated)
}

func (t tableHealth) judgeDead() finding {
	if t.dead > fewDead && t.dead > t.live {
		return warning.finding("VACUUM "+t.name+", and look for long transactions and for what keeps autovacuum away",
			"%d dead and %d live", t.dead, t.live)
	}
	return ok("%d dead and %d live", t.dead, t.live)
}

func (t tableHealth) judgeVacuum() finding {
	last, late := "never", true
	if t.vacuumed != nil {
		age := t.now.Sub(*t.vacuumed)
		last, late = fmt.Sprintf("%s, %v before now", instant(*t.vacuumed), age.Round(time.Second)), age > lateVacuum
	}
	switch {
	case !t.autovacuum:
		return problem.finding(fmt.Sprintf("ALTER TABLE %s RESET (autovacuum_enabled)", t.name), "it is turned off for this table; last visit: %s", last)
	case late && t.dead > fewDead:
		return warning.finding("VACUUM "+t.name+", and see whether autovacuum is busy elsewhere: pg_stat_progress_vacuum, autovacuum_max_workers",
			"last visit: %s, and there are %d dead tuples", last, t.dead)
	}
	return ok("last visit: %s", last)
}

func (t tableHealth) judgeAge(freezeMaxAge int64) finding {
	const do = "let VACUUM finish: end long transactions and prepared ones, drop abandoned replication slots, then VACUUM FREEZE "
	switch {
	case t.xidAge > failsafeAge:
		return problem.finding(do+t.name, "%d transactions old; at 2,100,000,000 Postgres stops taking commands", t.xidAge)
	case t.xidAge > freezeMaxAge+freezeMaxAge/10:
		return warning.finding(do+t.name, "%d transactions old, and autovacuum should have come at %d", t.xidAge, freezeMaxAge)
	}
	return ok("%d transactions old; autovacuum comes at %d", t.xidAge, freezeMaxAge)
}

func (t tableHealth) judgeBloat() finding {
	if t.bytes < smallTable {
		return ok("%s, too small to matter", size(t.bytes))
	}
	full := min(float64(t.sampledFilled)/math.Max(t.sampledBytes, 1), 1)
	if full < leastFull {
		return warning.finding("new rows will use the space; to give it back, VACUUM FULL, which locks the table, or pg_repack, which does not",
			"%s, of which rows fill %.0f %%", size(t.bytes), 100*full)
	}
	return ok("%s, of which rows fill %.0f %%", size(t.bytes), 100*full)
}

func (t tableHealth) judgeSweeping() finding {
	expired := t.sampledRows - t.sampledLive
	if t.bytes >= smallTable && float64(expired) > mostExpired*float64(t.sampledRows) {
		return warning.finding("run 'pgratelimit sweep' from cron, see deploy/",
			"%.0f %% of the rows have expired", 100*float64(expired)/float64(t.sampledRows))
	}
	if t.sampledRows == 0 {
		return ok("no rows")
	}
	return ok("%.0f %% of the rows have expired", 100*float64(expired)/float64(t.sampledRows))
}
