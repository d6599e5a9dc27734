package shards

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/lockholders"
)

// GrowConfig has the connections for [Grow]. While Grow runs, nothing else may use these connections.
type GrowConfig struct {
	Schema   string
	Proxies  []*pgx.Conn // connections to all proxies as superusers
	Old, New []*pgx.Conn // New[i] gets half of the keys of Old[i]; connections as the tables' owners
	// Connections are PL/Proxy's connection strings for the new shards.
	Connections []string
	// Progress is called after each step with the shard's place. Grow stops if Progress returns an error.
	Progress func(place int, step Step) error
}

// Step is a step of the division of a shard.
type Step string

// The steps of a division, in order.
const (
	Begun    Step = "begun"     // the proxies know the new shards; their connection strings still lead to old shards
	Copied   Step = "copied"    // the rows were copied while the old shard decided
	Stopped  Step = "stopped"   // calls to the old shard wait, and all later changes were copied
	GaveUp   Step = "gave up"   // the old shard refuses calls for the keys that moved
	TookOver Step = "took over" // the new shard decides calls for the keys that moved
	Switched Step = "switched"  // the proxies send calls for the keys that moved to the new shard
	Deleted  Step = "deleted"   // the old shard has deleted the rows that moved
)

// GrowLock is an advisory lock on the first shard. Grow and Undo hold the lock.
const GrowLock int64 = 0x706773687264677a // "pgshrdgz" in ASCII

// Grow turns n shards into 2n by dividing one shard after the other. While Grow runs, the shards decide calls. At most
// one shard decides calls for a key, and this shard has the key's whole usage. A shard trusts only its
// rate_limit_shard, and not the proxies. While a shard is stopped, calls wait as long as it takes to read the shard's
// tables once. After an error or a crash, another call of Grow continues.
func Grow(ctx context.Context, c GrowConfig) error {
	n := len(c.Old)
	unlock, err := c.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	note := &Growth{By: c.Connections, Proxies: len(c.Proxies)}
	if err := c.install(ctx, slices.All(c.Proxies), note, func(connections []string) []string {
		if len(connections) == n { // at first, the connection strings of the new shards lead to the old shards
			connections = append(connections, connections...)
		}
		return connections
	}); err != nil {
		return err
	}
	if err := c.Progress(0, Begun); err != nil {
		return err
	}
	for i := range n {
		if err := c.divide(ctx, i); err != nil {
			return fmt.Errorf("shard %d of %d: %w", i, n, err)
		}
	}
	for _, proxy := range slices.Backward(c.Proxies) {
		if err := noteGrowth(ctx, proxy, nil); err != nil {
			return err
		}
	}
	return nil
}

// ErrMoved is the error of Undo if a shard has already given up keys.
var ErrMoved = errors.New("it has given half of its keys up, so this cannot be undone any more")

// Undo reverts an interrupted [Grow]. Undo fails if a shard has already given up keys. New may leave out databases that
// cannot be reached, because the old shards have the usage of all keys.
func Undo(ctx context.Context, c GrowConfig) error {
	unlock, err := c.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	n := len(c.Old)
	for i, old := range c.Old {
		is, err := ReadIdentity(ctx, old, c.Schema)
		if err == nil && is.Shards != n {
			err = ErrMoved
		}
		if err != nil {
			return fmt.Errorf("shard %d of %d: %w", i, n, err)
		}
	}
	for _, old := range c.Old {
		if err := c.noteDeleted(ctx, old, false); err != nil {
			return err
		}
	}
	for _, to := range c.New {
		if err := c.empty(ctx, to); err != nil {
			return err
		}
	}
	return c.install(ctx, slices.Backward(c.Proxies), nil,
		func(connections []string) []string { return connections[:n] })
}

// empty removes the rows that Grow has copied to a new shard, unless the new shard owns the keys.
func (c GrowConfig) empty(ctx context.Context, conn *pgx.Conn) error {
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		var there bool
		if err := tx.QueryRow(ctx, "SELECT pg_catalog.to_regclass($1) IS NOT NULL",
			c.qualify("{schema}.rate_limit_shard")).Scan(&there); err != nil || !there {
			return err
		}
		var mark string
		if err := tx.QueryRow(ctx, c.qualify("SELECT coalesce(max(division), '') FROM {schema}.rate_limit_shard "+
			"WHERE place IS NULL")).Scan(&mark); err != nil || mark == "" || strings.HasPrefix(mark, Intended) {
			return err
		}
		return c.run(ctx, tx,
			"TRUNCATE "+allTables()+", {schema}.rate_limit_shard")
	})
}

// lock prevents other calls of Grow and Undo for the same shards.
func (c GrowConfig) lock(ctx context.Context) (unlock func(), err error) {
	var alone bool
	if err := c.Old[0].QueryRow(ctx, "SELECT pg_catalog.pg_try_advisory_lock($1)", GrowLock).Scan(&alone); err != nil {
		return nil, err
	}
	if !alone {
		id := GrowLock
		var holders []lockholders.Holder
		err := pgx.BeginTxFunc(ctx, c.Old[0], pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
			holders, err = lockholders.Holders(ctx, tx, 0, &id)
			return err
		})
		return nil, errors.Join(fmt.Errorf("these shards are being divided already, by %s: wait for the end of that",
			lockholders.Text(holders)), err)
	}
	return func() { // the lock also ends with the connection
		_, _ = c.Old[0].Exec(context.WithoutCancel(ctx), "SELECT pg_catalog.pg_advisory_unlock($1)", GrowLock)
	}, nil
}

// install changes each proxy's connection strings and Growth. The proxies must be in an order in which the first proxy
// gets its Growth first and loses it last.
func (c GrowConfig) install(
	ctx context.Context, proxies iter.Seq2[int, *pgx.Conn], note *Growth, change func(connections []string) []string,
) error {
	source, err := Read(ctx, c.Old[0], c.Schema)
	if err != nil {
		return err
	}
	for _, proxy := range proxies {
		if err := pgx.BeginFunc(ctx, proxy, func(tx pgx.Tx) error {
			connections, err := Connections(ctx, tx)
			if err != nil {
				return err
			}
			if err := Install(ctx, tx, source, Config{Schema: c.Schema, Connections: change(connections)}); err != nil {
				return err
			}
			return noteGrowth(ctx, tx, note)
		}); err != nil {
			return err
		}
	}
	return nil
}

// divide divides the shard with this place.
func (c GrowConfig) divide(ctx context.Context, place int) error {
	n, from, to := len(c.Old), c.Old[place], c.New[place]
	if err := prepare(ctx, to, c.Schema); err != nil {
		return err
	}
	had, err := ReadIdentity(ctx, from, c.Schema)
	if err != nil {
		return err
	}
	has, err := ReadIdentity(ctx, to, c.Schema)
	if err != nil {
		return err
	}
	half, other := Identity{place, 2 * n, had.Cluster}, Identity{place + n, 2 * n, had.Cluster}
	switch {
	case had == Identity{place, n, had.Cluster} && has == Identity{}:
		if err := c.move(ctx, place, half, other); err != nil {
			return err
		}
		fallthrough
	case had == half && has == Identity{}:
		if err := c.sameDivision(ctx, from, to); err != nil {
			return err
		}
		if err := setIdentity(ctx, to, c.Schema, other); err != nil {
			return err
		}
		if err := c.Progress(place, TookOver); err != nil {
			return err
		}
	case had == half && has == other: // an earlier call has divided this shard
	default:
		return fmt.Errorf("the old database is %v, and the new one %v", had, has)
	}
	for _, proxy := range c.Proxies {
		if _, err := proxy.Exec(ctx, fmt.Sprintf("ALTER SERVER %s OPTIONS (SET p%d %s)",
			Server, other.Place, literal(c.Connections[place])), pgx.QueryExecModeSimpleProtocol); err != nil {
			return err
		}
	}
	if err := c.Progress(place, Switched); err != nil {
		return err
	}
	if err := c.noteDeleted(ctx, from, false); err != nil {
		return err
	}
	for _, table := range tables() {
		if _, err := from.Exec(ctx, c.qualify("DELETE FROM {schema}."+table+
			" WHERE {schema}._rate_limit_shard(key, $1) = $2"), other.Shards, other.Place); err != nil {
			return err
		}
	}
	if err := c.run(ctx, from, "UPDATE {schema}.rate_limit_shard SET division = NULL"); err != nil {
		return err
	}
	return c.Progress(place, Deleted)
}

// sameDivision returns an error if the new database does not have the mark of the division in which the old shard gave
// up keys.
func (c GrowConfig) sameDivision(ctx context.Context, from, to *pgx.Conn) error {
	gave, err := readDivision(ctx, from, c.Schema)
	if err != nil {
		return err
	}
	got, err := readDivision(ctx, to, c.Schema)
	if err != nil {
		return err
	}
	if gave == "" || gave != got {
		return errors.New("it has given half of its keys to another database than this one: name that one, in the " +
			"same order as before")
	}
	return nil
}

// tables returns the names of the tables whose rows move.
func tables() []string {
	return []string{
		"rate_limit_ephemeral", "rate_limit_durable", "rate_limit_ephemeral_hold", "rate_limit_durable_hold",
	}
}

// allTables returns these names for a statement.
func allTables() string { return "{schema}." + strings.Join(tables(), ", {schema}.") }

// same returns the condition that row r of a table is the row that another row, o, is about.
func same(table, o string) string {
	condition := "r.prefix = " + o + ".prefix AND r.key = " + o + ".key"
	if strings.HasSuffix(table, "_hold") {
		condition += " AND r.id = " + o + ".id::uuid"
	}
	return condition
}

// move copies the rows of half of the keys to the new shard. Then the old shard gives up these keys.
func (c GrowConfig) move(ctx context.Context, place int, half, other Identity) error {
	from, to := c.Old[place], c.New[place]
	// Write the mark before the first row. So a database that has rows but no mark is not part of a division.
	division := rand.Text()
	if err := markDivision(ctx, to, c.Schema, division); err != nil {
		return err
	}
	// Remove rows that an interrupted call of move has copied.
	if err := c.run(ctx, to, "TRUNCATE "+allTables()); err != nil {
		return err
	}
	if err := c.noteDeleted(ctx, from, true); err != nil {
		return err
	}
	moves := fmt.Sprintf("{schema}._rate_limit_shard(key, %d) = %d", other.Shards, other.Place)
	var horizon string // transactions that changed rows during the copy have this id or a later id
	if err := pgx.BeginTxFunc(ctx, from, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		if err := tx.QueryRow(ctx, "SELECT (pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())"+
			"::text::numeric % 4294967296)::text").Scan(&horizon); err != nil {
			return err
		}
		for _, table := range tables() {
			if err := c.copy(ctx, tx, to, table, table, moves); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return err
	}
	if err := c.Progress(place, Copied); err != nil {
		return err
	}
	if err := pgx.BeginFunc(ctx, from, func(tx pgx.Tx) error {
		// The first lock waits for running calls, and the second lock waits for transactions on the shard itself.
		// lock_timeout is short, because new calls wait too.
		if err := c.run(ctx, tx, "SET LOCAL lock_timeout = '1s'",
			"LOCK TABLE {schema}.rate_limit_shard IN ACCESS EXCLUSIVE MODE",
			"LOCK TABLE "+allTables()+" IN SHARE MODE"); err != nil {
			return busy(err)
		}
		if err := c.catchUp(ctx, tx, to, moves, horizon); err != nil {
			return err
		}
		if err := c.continueFences(ctx, tx, to); err != nil {
			return err
		}
		if err := c.Progress(place, Stopped); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, c.qualify("UPDATE {schema}.rate_limit_shard SET shards = $1, division = $2"),
			half.Shards, division)
		return err
	}); err != nil {
		return err
	}
	return c.Progress(place, GaveUp)
}

// noteDeleted makes the old shard record deleted rows, or ends the recording. noteDeleted waits at most a second for
// transactions that use the tables, because new calls wait too.
func (c GrowConfig) noteDeleted(ctx context.Context, conn *pgx.Conn, begin bool) error {
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		// Lock all tables in the order in which calls and sweepers use them. The triggers use rate_limit_shard_deleted
		// last.
		if err := c.run(ctx, tx, "SET LOCAL lock_timeout = '1s'",
			"LOCK TABLE {schema}.rate_limit_sweeper, "+allTables()+" IN ACCESS EXCLUSIVE MODE",
			"TRUNCATE {schema}.rate_limit_shard_deleted"); err != nil {
			return busy(err)
		}
		for _, table := range tables() {
			on := " ON {schema}." + table
			statements := []string{
				"DROP TRIGGER IF EXISTS rate_limit_note_deleted" + on,
				"DROP TRIGGER IF EXISTS rate_limit_note_truncated" + on,
			}
			if begin {
				statements = append(statements,
					"CREATE TRIGGER rate_limit_note_deleted AFTER DELETE"+on+
						" FOR EACH ROW EXECUTE FUNCTION {schema}._rate_limit_note_deleted()",
					"CREATE TRIGGER rate_limit_note_truncated AFTER TRUNCATE"+on+
						" FOR EACH STATEMENT EXECUTE FUNCTION {schema}._rate_limit_note_deleted()")
			}
			if err := c.run(ctx, tx, statements...); err != nil {
				return err
			}
		}
		return nil
	})
}

// busy explains why a lock was not available.
func busy(err error) error {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "55P03" {
		return fmt.Errorf("a transaction uses the tables for longer than a second; end it, and try again: %w", err)
	}
	return err
}

// catchUp copies the changes since the horizon. catchUp reads the old tables once, and hashes few keys.
func (c GrowConfig) catchUp(ctx context.Context, from pgx.Tx, to *pgx.Conn, moves, horizon string) error {
	return pgx.BeginFunc(ctx, to, func(tx pgx.Tx) error {
		for _, table := range tables() {
			columns, err := c.columns(ctx, from, table)
			if err != nil {
				return err
			}
			if err := c.run(ctx, tx, "CREATE TEMP TABLE changed (LIKE {schema}."+table+") ON COMMIT DROP",
				"CREATE TEMP TABLE gone (LIKE {schema}.rate_limit_shard_deleted) ON COMMIT DROP"); err != nil {
				return err
			}
			if err := c.pipe(ctx, from.Conn(), to, "SELECT of, prefix, key, id FROM {schema}.rate_limit_shard_deleted "+
				"WHERE of = '"+table+"'", "gone (of, prefix, key, id)"); err != nil {
				return err
			}
			// A row that was frozen long ago may seem to be new. Copying a row again does no harm.
			if err := c.copy(ctx, from, to, table, "changed",
				"pg_catalog.age(xmin) <= pg_catalog.age('"+horizon+"'::xid) AND "+moves); err != nil {
				return err
			}
			if err := c.run(ctx, tx, "ANALYZE changed", "ANALYZE gone",
				"DELETE FROM {schema}."+table+" WHERE EXISTS (SELECT FROM gone WHERE key = '')",
				"DELETE FROM {schema}."+table+" AS r USING gone AS g WHERE "+same(table, "g"),
				"DELETE FROM {schema}."+table+" AS r USING changed AS c WHERE "+same(table, "c"),
				"INSERT INTO {schema}."+table+" ("+columns+") SELECT "+columns+" FROM changed",
				"DROP TABLE changed, gone"); err != nil {
				return err
			}
		}
		return nil
	})
}

// continueFences lets the new shard's fences begin beyond those of the old shard, so that the fences of a key that
// moves still ascend.
func (c GrowConfig) continueFences(ctx context.Context, from pgx.Tx, to *pgx.Conn) error {
	const sequence = "pg_catalog.pg_get_serial_sequence($1, 'fence')::pg_catalog.regclass"
	var last *int64
	table := c.qualify("{schema}.rate_limit_durable_hold")
	err := from.QueryRow(ctx, "SELECT pg_catalog.pg_sequence_last_value("+sequence+")", table).Scan(&last)
	if err != nil || last == nil {
		return err
	}
	_, err = to.Exec(ctx, "SELECT pg_catalog.setval("+sequence+", "+
		"greatest(pg_catalog.pg_sequence_last_value("+sequence+"), $2))", table, *last)
	return err
}

// run runs several statements.
func (c GrowConfig) run(ctx context.Context, on execer, statements ...string) error {
	for _, statement := range statements {
		if _, err := on.Exec(ctx, c.qualify(statement), pgx.QueryExecModeSimpleProtocol); err != nil {
			return err
		}
	}
	return nil
}

// execer is a connection or a transaction.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// copy copies the rows of a table that fulfill a condition.
func (c GrowConfig) copy(ctx context.Context, from pgx.Tx, to *pgx.Conn, table, into, where string) error {
	columns, err := c.columns(ctx, from, table)
	if err != nil {
		return err
	}
	if into == table {
		into = "{schema}." + table
	}
	return c.pipe(ctx, from.Conn(), to,
		"SELECT "+columns+" FROM {schema}."+table+" WHERE "+where, into+" ("+columns+")")
}

// pipe copies the rows of a query into a table of another database.
func (c GrowConfig) pipe(ctx context.Context, from, to *pgx.Conn, query, into string) error {
	reader, writer := io.Pipe()
	copied := make(chan error, 1)
	go func() {
		_, err := to.PgConn().CopyFrom(ctx, reader, c.qualify("COPY "+into+" FROM STDIN (FORMAT binary)"))
		_ = reader.CloseWithError(err)
		copied <- err
	}()
	_, err := from.PgConn().CopyTo(ctx, writer, c.qualify("COPY ("+query+") TO STDOUT (FORMAT binary)"))
	_ = writer.CloseWithError(err)
	return errors.Join(err, <-copied)
}

// columns returns the names of a table's columns.
func (c GrowConfig) columns(ctx context.Context, tx pgx.Tx, table string) (columns string, err error) {
	err = tx.QueryRow(ctx, `
SELECT pg_catalog.string_agg(pg_catalog.quote_ident(a.attname), ', ' ORDER BY a.attnum)
FROM pg_catalog.pg_attribute AS a
WHERE a.attrelid = pg_catalog.to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped`,
		c.qualify("{schema}."+table)).Scan(&columns)
	return columns, err
}

func (c GrowConfig) qualify(sql string) string { return qualify(sql, c.Schema) }
