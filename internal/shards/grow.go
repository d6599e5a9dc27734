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

// GrowConfig has the connections for [Grow]. Nothing else may use them meanwhile.
type GrowConfig struct {
	Schema   string
	Proxies  []*pgx.Conn // all proxies, as superusers
	Old, New []*pgx.Conn // New[i] gets the keys that Old[i] gives up; both as the tables' owners
	// Connections are the connection strings with which PL/Proxy reaches the new shards.
	Connections []string
	// Progress is called after each step, with the shard's place. If it returns an error, Grow stops there.
	Progress func(place int, step Step) error
}

// Step is a finished step for one shard.
type Step string

// The steps in their order.
const (
	Begun    Step = "begun"     // the proxies know twice as many shards; the new ones still lead to the old ones
	Copied   Step = "copied"    // while the shard went on deciding
	Stopped  Step = "stopped"   // calls wait, and later changes have been copied too
	GaveUp   Step = "gave up"   // the old shard refuses the keys that it no longer owns
	TookOver Step = "took over" // the new shard owns them
	Switched Step = "switched"  // the proxies know
	Deleted  Step = "deleted"   // the old shard has deleted their rows
)

// GrowLock is the advisory lock on the first shard while shards are divided.
const GrowLock int64 = 0x706773687264677a // "pgshrdgz" in ASCII

// Grow turns n shards into 2n, one after the other, while they go on deciding. At any time at most one shard decides a
// key, with the key's whole usage. A shard trusts only its own row of rate_limit_shard, and not the proxies. Calls for
// a shard wait while it is stopped. That takes as long as reading its tables once. After an error or a crash, the same
// call continues where it stopped.
func Grow(ctx context.Context, c GrowConfig) error {
	n := len(c.Old)
	unlock, err := c.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	note := &Growth{By: c.Connections, Proxies: len(c.Proxies)}
	if err := c.install(ctx, slices.All(c.Proxies), note, func(connections []string) []string {
		if len(connections) == n { // at first the new shards lead to the old ones
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

// ErrMoved says why a division cannot be undone.
var ErrMoved = errors.New("it has given half of its keys up, so this cannot be undone any more")

// Undo reverts an interrupted [Grow], if no shard has given up keys yet. New may leave out databases that cannot be
// reached: they get no calls, and the old shards have the usage of all keys.
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

// empty removes unused copies of rows.
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
			"TRUNCATE {schema}.rate_limit_ephemeral, {schema}.rate_limit_durable, {schema}.rate_limit_shard")
	})
}

// lock prevents others from dividing the same shards.
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

// install changes each proxy's map of shards, and its record of the division. The order of the calls ensures that the
// first proxy has the record as long as any other has it.
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

// divide divides the shard at a place.
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
	case had == half && has == other: // an earlier call has done this
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

// sameDivision returns an error unless the new database owns the keys that the old one gave up.
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

// tables are the tables whose rows move.
func tables() []string { return []string{"rate_limit_ephemeral", "rate_limit_durable"} }

// move copies the rows of the keys that the old shard gives up. Then the old shard gives them up.
func (c GrowConfig) move(ctx context.Context, place int, half, other Identity) error {
	from, to := c.Old[place], c.New[place]
	// The mark is written before the first row. So a database with rows and no mark was never part of this division.
	division := rand.Text()
	if err := markDivision(ctx, to, c.Schema, division); err != nil {
		return err
	}
	// Remove the rows that an earlier call left there.
	if err := c.run(ctx, to, "TRUNCATE {schema}.rate_limit_ephemeral, {schema}.rate_limit_durable"); err != nil {
		return err
	}
	if err := c.noteDeleted(ctx, from, true); err != nil {
		return err
	}
	moves := fmt.Sprintf("{schema}._rate_limit_shard(key, %d) = %d", other.Shards, other.Place)
	var horizon string // later changes come from this transaction or newer ones
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
		// This waits for the running calls, but only briefly, because new calls wait behind it. The second lock waits
		// for transactions that take directly in the shard's database.
		if err := c.run(ctx, tx, "SET LOCAL lock_timeout = '1s'",
			"LOCK TABLE {schema}.rate_limit_shard IN ACCESS EXCLUSIVE MODE",
			"LOCK TABLE {schema}.rate_limit_ephemeral, {schema}.rate_limit_durable IN SHARE MODE"); err != nil {
			return busy(err)
		}
		if err := c.catchUp(ctx, tx, to, moves, horizon); err != nil {
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

// noteDeleted makes the old shard record deleted rows, or stops that. It waits for transactions that use the tables,
// but only briefly, because others wait behind it.
func (c GrowConfig) noteDeleted(ctx context.Context, conn *pgx.Conn, begin bool) error {
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if err := c.run(ctx, tx, "SET LOCAL lock_timeout = '1s'",
			"TRUNCATE {schema}.rate_limit_shard_deleted"); err != nil {
			return err
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
				return busy(err)
			}
		}
		return nil
	})
}

// busy says why a lock was not available.
func busy(err error) error {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == "55P03" {
		return fmt.Errorf("a transaction uses the tables for longer than a second; end it, and try again: %w", err)
	}
	return err
}

// catchUp copies the changes since the horizon. It reads the tables once, and computes hashes for few rows only.
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
			if err := c.pipe(ctx, from.Conn(), to, "SELECT of, prefix, key FROM {schema}.rate_limit_shard_deleted "+
				"WHERE of = '"+table+"'", "gone (of, prefix, key)"); err != nil {
				return err
			}
			// A row that was frozen long ago may look new; copying it again is harmless.
			if err := c.copy(ctx, from, to, table, "changed",
				"pg_catalog.age(xmin) <= pg_catalog.age('"+horizon+"'::xid) AND "+moves); err != nil {
				return err
			}
			if err := c.run(ctx, tx, "ANALYZE changed", "ANALYZE gone",
				"DELETE FROM {schema}."+table+" WHERE EXISTS (SELECT FROM gone WHERE key = '')",
				"DELETE FROM {schema}."+table+" AS r USING gone AS g WHERE r.prefix = g.prefix AND r.key = g.key",
				"DELETE FROM {schema}."+table+" AS r USING changed AS c WHERE r.prefix = c.prefix AND r.key = c.key",
				"INSERT INTO {schema}."+table+" ("+columns+") SELECT "+columns+" FROM changed",
				"DROP TABLE changed, gone"); err != nil {
				return err
			}
		}
		return nil
	})
}

// run runs statements.
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

// copy copies rows of a table by column names.
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

// pipe copies the result of a query.
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

// columns are a table's column names.
func (c GrowConfig) columns(ctx context.Context, tx pgx.Tx, table string) (columns string, err error) {
	err = tx.QueryRow(ctx, `
SELECT pg_catalog.string_agg(pg_catalog.quote_ident(a.attname), ', ' ORDER BY a.attnum)
FROM pg_catalog.pg_attribute AS a
WHERE a.attrelid = pg_catalog.to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped`,
		c.qualify("{schema}."+table)).Scan(&columns)
	return columns, err
}

func (c GrowConfig) qualify(sql string) string { return qualify(sql, c.Schema) }
