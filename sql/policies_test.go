package sql_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// policyReader reads policies as a process does: first all policies, then only changes.
type policyReader struct {
	known *int64
	told  int               // how many ids the last result had
	rows  map[int64]*string // the policies by id; nil for a row without a policy
}

// read calls rate_limit_policies once, and returns whether the result was complete.
func (r *policyReader) read(t *testing.T, db pgtest.Querier) (complete bool) {
	t.Helper()
	rows, err := db.Query(t.Context(), "SELECT version, complete, id, removed, policy FROM rate_limit_policies($1)", r.known)
	require.NoError(t, err)
	r.told = 0
	first := true
	var version int64
	var id *int64
	var removed *bool
	var policy *string
	_, err = pgx.ForEachRow(rows, []any{&version, &complete, &id, &removed, &policy}, func() error {
		if first && (complete || r.rows == nil) {
			r.rows = map[int64]*string{}
		}
		r.known, first = &[]int64{version}[0], false
		if id != nil {
			r.told++
			r.rows[*id] = policy
			if *removed {
				delete(r.rows, *id)
			}
		}
		return nil
	})
	require.NoError(t, err)
	require.False(t, first, "an answer has at least one row")
	return complete
}

// policies returns all policies that the reader knows.
func (r *policyReader) policies() []string {
	var all []string
	for _, policy := range r.rows {
		all = append(all, *policy)
	}
	slices.Sort(all)
	return all
}

const addPolicySQL = "INSERT INTO rate_limit_policy (name, key, policy, comment) VALUES ('n', $1, $2, 'why')"

// A row that limiters could not read is refused. The error says what is wrong and what is right. The error contains no
// part of a key.
func TestPoliciesThatNobodyCouldRead(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, addPolicySQL, "secret", "fixed 1/1h")
	const columns = "INSERT INTO rate_limit_policy " +
		"(name, key, key_prefix, mode, policy, valid_from, valid_until, comment, automatic) VALUES "
	for values, want := range map[string]string{
		"(NULL, 'secret', NULL, 'off', NULL, now(), 'infinity', 'why', false)":                                     "name",
		"('', 'secret', NULL, 'off', NULL, now(), 'infinity', 'why', false)":                                       "name",
		"(repeat('n', 129), 'secret', NULL, 'off', NULL, now(), 'infinity', 'why', false)":                         "name",
		"('n', '', NULL, 'off', NULL, now(), 'infinity', 'why', false)":                                            "key",
		"('n', repeat('secret', 86), NULL, 'off', NULL, now(), 'infinity', 'why', false)":                          "key",
		"('n', NULL, '', 'off', NULL, now(), 'infinity', 'why', false)":                                            "key_prefix",
		"('n', NULL, repeat('secret', 86), 'off', NULL, now(), 'infinity', 'why', false)":                          "key_prefix",
		"('n', 'secret', 'secr', 'off', NULL, now(), 'infinity', 'why', false)":                                    "key_prefix",
		"('n', 'secret', NULL, 'on', NULL, now(), 'infinity', 'why', false)":                                       "mode",
		"('n', 'secret', NULL, NULL, NULL, now(), 'infinity', 'why', false)":                                       "mode",
		"('n', 'secret', NULL, 'shadow', 'concurrent 5', now(), 'infinity', 'why', false)":                         "mode",
		"('n', 'secret', NULL, 'shadow', 'fixed 1/1h, concurrent 5', now(), 'infinity', 'why', false)":             "mode",
		"('n', 'secret', NULL, 'enforce', NULL, now(), 'infinity', 'why', false)":                                  "policy",
		"('n', 'secret', NULL, 'shadow', NULL, now(), 'infinity', 'why', false)":                                   "policy",
		"('n', 'secret', NULL, 'off', 'fixed 1/1h', now(), 'infinity', 'why', false)":                              "policy",
		"('n', 'secret', NULL, 'deny', 'fixed 1/1h', now(), 'infinity', 'why', false)":                             "policy",
		"('n', 'secret', NULL, 'enforce', 'fixed 1', now(), 'infinity', 'why', false)":                             "policy",
		"('n', 'secret', NULL, 'shadow', 'fixed 0/1h', now(), 'infinity', 'why', false)":                           "policy",
		"('n', 'secret', NULL, 'off', NULL, now(), now(), 'why', false)":                                           "valid_until",
		"('n', 'secret', NULL, 'off', NULL, NULL, 'infinity', 'why', false)":                                       "valid_from",
		"('n', 'secret', NULL, 'off', NULL, '0001-01-01 BC', 'infinity', 'why', false)":                            "valid_from",
		"('n', 'secret', NULL, 'off', NULL, '-infinity', '0044-03-15 BC', 'why', false)":                           "valid_until",
		"('n', 'secret', NULL, 'off', NULL, now(), '10000-01-01', 'why', false)":                                   "valid_until",
		"('n', 'secret', NULL, 'off', NULL, now(), 'infinity', E' \\n', false)":                                    "comment",
		"('n', 'secret', NULL, 'enforce', 'every 1/day Mars/Phobos', now(), 'infinity', 'why', false)":             "policy",
		"('n', 'secret', NULL, 'enforce', 'every 1/day Right/Europe/Berlin', now(), 'infinity', 'why', false)":     "policy",
		"(repeat('n', 122), 'secret', NULL, 'shadow', 'fixed 1/1h', now(), 'infinity', 'why', false)":              "name",
		"(repeat('n', 127), 'secret', NULL, 'enforce', 'fixed 1/1h, fixed 1/2h', now(), 'infinity', 'why', false)": "name",
		"('n', 'secret', NULL, 'off', NULL, now(), NULL, 'why', false)":                                            "valid_until",
		"('n', 'secret', NULL, 'off', NULL, 'infinity', 'infinity', 'why', false)":                                 "valid_from",
		"('n', 'secret', NULL, 'off', NULL, '9999-12-31 00:00Z', 'infinity', 'why', false)":                        "valid_from",
		"('n', 'secret', NULL, 'off', NULL, '294276-12-31', 'infinity', 'why', false)":                             "valid_from",
		"('n', 'secret', NULL, 'off', NULL, now(), 'infinity', NULL, false)":                                       "comment",
		"('n', 'secret', NULL, 'off', NULL, now(), 'infinity', '  ', false)":                                       "comment",
		"('n', 'secret', NULL, 'off', NULL, now(), 'infinity', 'why', NULL)":                                       "automatic",
		"('n', 'secret', NULL, 'enforce', 'log 1/1h,log 1/2h,log 1', now(), 'infinity', 'why', false)":             "policy",
		"('n', 'secret', NULL, 'enforce', 'sliding 99999999999999999999/1h', now(), 'infinity', 'x', true)":        "policy",
	} {
		refusedPolicy(t, db.Pool, columns+values, want)
	}
	for change, want := range map[string]string{
		"SET id = DEFAULT": "id", "SET name = ''": "name", "SET mode = 'deny'": "policy",
		"SET policy = 'none'": "policy", "SET comment = ''": "comment",
		"SET key_prefix = 'secr'": "key_prefix", "SET valid_until = '-infinity'": "valid_until",
		"SET valid_from = '10000-01-01'": "valid_from",
	} {
		refusedPolicy(t, db.Pool, "UPDATE rate_limit_policy "+change, want)
	}
	for _, id := range []string{"NULL", "0", "-1", "-9223372036854775808", "9007199254740993", "9223372036854775807"} {
		refusedPolicy(t, db.Pool, `INSERT INTO rate_limit_policy (id, name, key, mode, comment)
			OVERRIDING SYSTEM VALUE VALUES (`+id+`, 'n', 'secret', 'off', 'why')`, "id")
	}

	// The smallest and the largest value of each range are valid.
	for _, values := range []string{
		"(repeat('n', 128), repeat('k', 512), NULL, 'off', NULL, now(), 'infinity', 'why', false)",
		"('n', NULL, repeat('k', 512), 'shadow', 'log 1000/1us', '-infinity', now(), 'why', true)",
		"('n', NULL, NULL, 'deny', NULL, now(), now() + '1 microsecond', 'why', false)",
		"('n', NULL, NULL, 'deny', NULL, '9999-12-30 23:59:59Z', 'infinity', 'why', false)",
		`('n', E'line\nbreak', NULL, 'enforce', 'sliding 1/1s, bucket 20 5/10s', now(), 'infinity', 'why', false)`,
	} {
		pgtest.Exec(t, db.Pool, columns+values)
	}
	require.Equal(t, 6, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_policy"))
	require.Equal(t, 6, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_policy_history"))
}

// Bans still work after a person has given a large id to a row, even after the row is deleted.
func TestLargeIDsLeaveRoomForBans(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	for _, id := range []string{"4503599627370496", "9007199254740991", "9007199254740992", "9223372036854775807"} {
		db := pgtest.New(t)
		tx := pgtest.Begin(t, db)
		if id == "9223372036854775807" { // written without the triggers
			pgtest.Exec(t, tx, "SET LOCAL session_replication_role = replica")
		}
		pgtest.Exec(t, tx, `INSERT INTO rate_limit_policy (id, name, key, mode, comment) OVERRIDING SYSTEM VALUE
			VALUES (`+id+`, 'n', 'large', 'off', 'why')`)
		pgtest.Exec(t, tx, `INSERT INTO rate_limit_policy_history (version, at, by, action, policy_id)
			OVERRIDING SYSTEM VALUE VALUES (`+id+`, now(), 'who', 'insert', `+id+`)`)
		require.NoError(t, tx.Commit(t.Context()))
		ban := func(key string) {
			pgtest.Exec(t, db.Pool, "SELECT rate_limit_ban('n', $1, '1h', '1h', '1h', 'why')", key)
		}
		ban("a")
		pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET comment = 'other' WHERE key = 'large'")
		ban("b")
		pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy WHERE key = 'large'")
		ban("c")
		require.Equal(t, 3, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_policy"), id)
	}
}

// refusedPolicy runs a statement that the database must refuse because of a column. The error must not contain the key.
func refusedPolicy(t *testing.T, db pgtest.Executor, sql, column string) {
	t.Helper()
	_, err := db.Exec(t.Context(), sql)
	pgErr := new(pgconn.PgError)
	require.ErrorAs(t, err, &pgErr, sql)
	require.Equal(t, "22023", pgErr.Code, "%s: %v", sql, pgErr)
	require.Equal(t, column, pgErr.ColumnName, sql)
	require.Contains(t, pgErr.Message, "rate_limit: ", sql)
	require.NotEmpty(t, pgErr.Hint, sql)
	require.NotContains(t, pgErr.Message+pgErr.Detail+pgErr.Hint, "secr", sql)
}

// No error of a constraint contains a key, and nobody can truncate the table.
func TestPoliciesAreNotTruncated(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, addPolicySQL, "secret", "fixed 1/1h")
	_, err := db.Pool.Exec(t.Context(), "TRUNCATE rate_limit_policy")
	pgErr := new(pgconn.PgError)
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "0A000", pgErr.Code)
	require.Contains(t, pgErr.Message, "cannot be truncated")
	require.Contains(t, pgErr.Hint, "DELETE")
	_, err = db.Pool.Exec(t.Context(), `INSERT INTO rate_limit_policy (id, name, key, mode, comment)
		OVERRIDING SYSTEM VALUE VALUES (1, 'n', 'secret', 'off', 'why')`)
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "23505", pgErr.Code)
	require.NotContains(t, pgErr.Message+pgErr.Detail, "secret")
	require.Equal(t, 1, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_policy"))
}

// The history has each change, with the row before and after it. The history names the role that logged in, even after
// SET ROLE.
func TestHistoryOfPolicies(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	db := pgtest.New(t)
	conn := pgtest.Connect(t, db)
	me := pgtest.Scalar[string](t, conn, "SELECT session_user::text")
	pgtest.Exec(t, conn, "GRANT SELECT, INSERT, UPDATE, DELETE ON rate_limit_policy TO pg_monitor; SET ROLE pg_monitor")
	for _, sql := range []string{
		`INSERT INTO rate_limit_policy (name, key, policy, comment, changed_by, changed_at)
			VALUES ('n', E'a\nb', 'fixed 1/1h', 'one', 'somebody else', '2001-01-01')`,
		"UPDATE rate_limit_policy SET policy = 'fixed 2/1h', comment = 'two', changed_by = 'somebody else'",
		"UPDATE rate_limit_policy SET comment = 'nobody' WHERE name = 'none'",
		"DELETE FROM rate_limit_policy",
	} {
		pgtest.Exec(t, conn, sql)
	}
	_, err := conn.Exec(t.Context(), "DELETE FROM rate_limit_policy_history")
	pgErr := new(pgconn.PgError)
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "42501", pgErr.Code)
	pgtest.Exec(t, conn, "RESET ROLE")

	type change struct {
		Action, By string
		ID         int64
		Before     map[string]any
		After      map[string]any
	}
	rows, err := conn.Query(t.Context(), `SELECT action, by, policy_id AS id, before, after
		FROM rate_limit_policy_history WHERE at > now() - interval '1 hour' ORDER BY version`)
	require.NoError(t, err)
	changes, err := pgx.CollectRows(rows, pgx.RowToStructByName[change])
	require.NoError(t, err)
	require.Len(t, changes, 3)
	require.Nil(t, changes[0].Before)
	require.Nil(t, changes[2].After)
	for i, action := range []string{"insert", "update", "delete"} {
		require.Equal(t, action, changes[i].Action)
		require.Equal(t, me, changes[i].By)
		require.Equal(t, changes[0].ID, changes[i].ID)
		if i > 0 {
			require.Equal(t, changes[i-1].After, changes[i].Before)
		}
	}
	require.Equal(t, "a\nb", changes[0].After["key"])
	require.Equal(t, "two", changes[1].After["comment"])
	require.Equal(t, "fixed 2/1h", changes[2].Before["policy"])
	for _, row := range []map[string]any{changes[0].After, changes[1].After} {
		require.Equal(t, me, row["changed_by"])
		require.NotContains(t, row["changed_at"], "2001")
	}
}

// A process reads all policies once, and then only changes.
func TestProcessesReadWhatHasChanged(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	var reader policyReader
	require.True(t, reader.read(t, db.Pool))
	require.Zero(t, *reader.known)
	require.Zero(t, reader.told)
	require.False(t, reader.read(t, db.Pool))

	for _, key := range []string{"a", "b", "c"} {
		pgtest.Exec(t, db.Pool, addPolicySQL, key, "fixed 1/1h")
	}
	require.True(t, reader.read(t, db.Pool)) // the reader cannot know whether the history has all changes since version 0
	require.Equal(t, []string{"fixed 1/1h", "fixed 1/1h", "fixed 1/1h"}, reader.policies())
	require.Equal(t, 3, reader.told)
	require.False(t, reader.read(t, db.Pool))
	require.Zero(t, reader.told) // nothing has changed

	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET policy = 'fixed 2/1h' WHERE key = 'a'")
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET policy = 'fixed 3/1h' WHERE key = 'a'")
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy WHERE key = 'b'")
	require.False(t, reader.read(t, db.Pool))
	require.Equal(t, []string{"fixed 1/1h", "fixed 3/1h"}, reader.policies())
	require.Equal(t, 2, reader.told) // each row is reported once

	// A row that was inserted and deleted between two reads is reported as removed. A row that has ended is reported.
	pgtest.Exec(t, db.Pool, addPolicySQL, "d", "fixed 4/1h")
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy WHERE key = 'd'")
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET valid_until = clock_timestamp() WHERE key = 'c'")
	require.False(t, reader.read(t, db.Pool))
	require.Equal(t, []string{"fixed 1/1h", "fixed 3/1h"}, reader.policies())
	require.Equal(t, 2, reader.told)

	// If all rows are read, rows that have ended are left out, and rows that begin later are included.
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET valid_from = now() + interval '1 day' WHERE key = 'a'")
	var all policyReader
	require.True(t, all.read(t, db.Pool))
	require.Equal(t, []string{"fixed 3/1h"}, all.policies())

	// If the history does not have the known version, all rows are read again.
	for _, known := range []int64{*all.known - 1, *all.known + 100} {
		pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy_history WHERE version < $1", *all.known)
		old := policyReader{known: &known, rows: reader.rows}
		require.True(t, old.read(t, db.Pool))
		require.Equal(t, []string{"fixed 3/1h"}, old.policies())
		require.Equal(t, *all.known, *old.known)
	}
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy_history")
	require.True(t, all.read(t, db.Pool))
	require.Zero(t, *all.known)
	pgtest.Exec(t, db.Pool, addPolicySQL, "e", "fixed 5/1h")
	require.True(t, all.read(t, db.Pool))
	require.Equal(t, []string{"fixed 3/1h", "fixed 5/1h"}, all.policies())

	// The process last saw an empty history, and the history was deleted later.
	none := policyReader{known: &[]int64{0}[0], rows: map[int64]*string{}}
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy_history")
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET comment = 'other' WHERE key = 'e'")
	none.read(t, db.Pool)
	require.Equal(t, []string{"fixed 3/1h", "fixed 5/1h"}, none.policies())
	require.Equal(t, []string{"fixed 3/1h", "fixed 5/1h"}, all.policies())

	// Rows that people wrote come first, and bans that end soon come last.
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_ban('n', 'x', '1h', '1h', '1h', 'why')")
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_ban('n', 'y', '2h', '2h', '1h', 'why')")
	pgtest.Exec(t, db.Pool, addPolicySQL, "f", "fixed 6/1h")
	require.Equal(t, []string{"a", "e", "f", "y", "x"}, pgtest.Scalar[[]string](t, db.Pool,
		"SELECT array_agg(p.key) FROM rate_limit_policies() AS p"))
}

// A process that reads while several sessions write misses no change, in whatever order the sessions commit. Without
// the lock, a process would miss changes of a long transaction.
func TestInterleavedWritersOfPolicies(t *testing.T) {
	t.Parallel()

	for _, locks := range []bool{true, false} {
		db := pgtest.New(t)
		if !locks {
			pgtest.Rewrite(t, db.Pool, "_rate_limit_note_policy",
				"LOCK TABLE public.rate_limit_policy_history IN SHARE UPDATE EXCLUSIVE MODE", "PERFORM 1")
		}
		var reader policyReader
		reader.read(t, db.Pool)
		long := pgtest.Begin(t, db)
		pgtest.Exec(t, long, addPolicySQL, "long", "fixed 1/1h")
		short := testkit.Later(func() (pgconn.CommandTag, error) {
			return db.Pool.Exec(t.Context(), addPolicySQL, "short", "fixed 2/1h")
		})
		if locks {
			pgtest.WaitUntilBlocked(t, db.Pool, 1)
		} else {
			_, err := short()
			require.NoError(t, err)
		}
		reader.read(t, db.Pool)
		require.NoError(t, long.Commit(t.Context()))
		if locks {
			_, err := short()
			require.NoError(t, err)
		}
		reader.read(t, db.Pool)
		reader.read(t, db.Pool)
		if locks {
			require.Equal(t, []string{"fixed 1/1h", "fixed 2/1h"}, reader.policies())
		} else {
			require.Equal(t, []string{"fixed 2/1h"}, reader.policies(), "nothing is missed without the lock either")
		}
	}
}

// Two people change the same policies in different orders. Before a transaction locks a row, it waits for the other
// transaction, so the two do not deadlock. If the first changed row took the lock, both transactions would deadlock.
func TestWritersOfPoliciesDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	for _, early := range []bool{true, false} {
		db := pgtest.New(t)
		pgtest.Exec(t, db.Pool, addPolicySQL, "a", "fixed 1/1h")
		pgtest.Exec(t, db.Pool, addPolicySQL, "b", "fixed 1/1h")
		if !early {
			pgtest.Exec(t, db.Pool, "DROP TRIGGER rate_limit_policy_turn ON rate_limit_policy")
			pgtest.Rewrite(t, db.Pool, "_rate_limit_note_policy", "    INSERT INTO",
				"    LOCK TABLE public.rate_limit_policy_history IN SHARE UPDATE EXCLUSIVE MODE; INSERT INTO")
		}
		const change = "UPDATE rate_limit_policy SET comment = comment WHERE key = $1"
		one, two := pgtest.Begin(t, db), pgtest.Begin(t, db)
		pgtest.Exec(t, one, change, "a")
		second := testkit.Later(func() (pgconn.CommandTag, error) { return two.Exec(t.Context(), change, "b") })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		_, err := one.Exec(t.Context(), change, "b")
		if err == nil {
			err = one.Commit(t.Context())
		} else {
			require.NoError(t, one.Rollback(t.Context()))
		}
		_, other := second()
		if err = errors.Join(err, other); early {
			require.NoError(t, err)
			_, err = two.Exec(t.Context(), change, "a")
			require.NoError(t, errors.Join(err, two.Commit(t.Context())))
		} else {
			require.ErrorContains(t, err, "40P01")
			require.NoError(t, two.Rollback(t.Context()))
		}
	}
}

// After many concurrent changes, each reader has exactly the rows of the table.
func TestReadersOfPoliciesUnderWriters(t *testing.T) {
	t.Parallel()

	const writers, each, looks = 4, 25, 30
	db := pgtest.New(t)
	readers := make([]policyReader, 2)
	errs := make([]error, writers)
	testkit.Together(writers+len(readers), func(i int) {
		if i >= writers {
			for range looks {
				readers[i-writers].read(t, db.Pool)
			}
			return
		}
		key := string(rune('a' + i))
		for n := range each {
			errs[i] = errors.Join(errs[i], pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
				_, err := tx.Exec(t.Context(), "DELETE FROM rate_limit_policy WHERE key = $1 AND id % 3 > 0", key)
				if err == nil {
					_, err = tx.Exec(t.Context(), addPolicySQL, key, fmt.Sprintf("fixed %d/1h", n+1))
				}
				return err
			}))
		}
	})
	require.NoError(t, errors.Join(errs...))
	var fresh policyReader
	fresh.read(t, db.Pool)
	for _, reader := range readers {
		reader.read(t, db.Pool)
		require.Equal(t, fresh.policies(), reader.policies())
		require.ElementsMatch(t, slices.Collect(maps.Keys(fresh.rows)), slices.Collect(maps.Keys(reader.rows)))
	}
}

// Each transaction that changes policies notifies the processes once.
func TestPoliciesWakeUpProcesses(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	db := pgtest.New(t)
	conn := pgtest.Connect(t, db)
	pgtest.Exec(t, conn, "LISTEN rate_limit")
	pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_policy (name, mode, comment) VALUES ('n', 'off', 'why'), ('o', 'off', 'why')")
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET comment = 'none' WHERE name = 'p'")
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy")
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Amply)
	defer cancel()
	for range 2 {
		notification, err := conn.WaitForNotification(ctx)
		require.NoError(t, err)
		require.Equal(t, "rate_limit", notification.Channel)
		require.Equal(t, "policies", notification.Payload)
	}
	pgtest.Exec(t, db.Pool, "NOTIFY rate_limit, 'last'")
	notification, err := conn.WaitForNotification(ctx)
	require.NoError(t, err)
	require.Equal(t, "last", notification.Payload)
}

// The application needs only EXECUTE on each function, and no right on the tables. Decoys change nothing.
func TestPoliciesNeedNothingButExecute(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	pool := pgtest.Application(t, db, "..")
	const read = "SELECT count(*) FROM public.rate_limit_policies()"
	const ban = "SELECT made FROM public.rate_limit_ban('n', 'k', '1h', '1h', '1h', 'why')"
	pgtest.Exec(t, db.Pool, "REVOKE ALL ON FUNCTION rate_limit_policies, rate_limit_ban FROM pg_monitor")
	for _, sql := range []string{read, ban} {
		pgtest.Refused(t, pool, sql, sql, "42501")
	}
	pgtest.Exec(t, db.Pool, "GRANT EXECUTE ON FUNCTION rate_limit_policies, rate_limit_ban TO pg_monitor")
	require.True(t, pgtest.Scalar[bool](t, pool, ban))
	require.Equal(t, 1, pgtest.Scalar[int](t, pool, read))
	for _, sql := range []string{
		"SELECT FROM public.rate_limit_policy", "SELECT FROM public.rate_limit_policy_history", "DELETE FROM public.rate_limit_policy",
		"INSERT INTO public.rate_limit_policy (name, mode, comment) VALUES ('n', 'off', 'why')",
	} {
		pgtest.Refused(t, pool, sql, sql, "42501")
	}
	// Nobody can call the trigger functions.
	for _, sql := range []string{"SELECT public._rate_limit_check_policy()", "SELECT public._rate_limit_note_policy()"} {
		_, err := pool.Exec(t.Context(), sql)
		require.Error(t, err)
	}
}

// The schema may have any name.
func TestPoliciesInASchemaWithAnOddName(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	const schema = `it's a "rate_limit_" schema \ of ours`
	pgtest.Exec(t, db.Pool, "CREATE SCHEMA "+pgx.Identifier{schema}.Sanitize())
	pool := db.OwnerPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	})
	require.NoError(t, migrations.Up(t.Context(), pool))
	pgtest.Exec(t, pool, addPolicySQL, "a", "fixed 1/1h")
	refusedPolicy(t, pool, "UPDATE rate_limit_policy SET policy = 'none'", "policy")
	require.True(t, pgtest.Scalar[bool](t, pool, "SELECT made FROM rate_limit_ban('n', 'k', '1h', '1h', '1h', 'why')"))
	pgtest.Exec(t, pool, "DELETE FROM rate_limit_policy WHERE key = 'a'")
	var reader policyReader
	require.True(t, reader.read(t, pool))
	require.Len(t, reader.rows, 1)
}

// A plan that was made while the tables were small does not scan them after they have grown. If a function may use
// sequential scans, the plan scans the tables.
func TestThoroughPlansOfPolicies(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")

	scans := func(mode string, change string) pgtest.Scans {
		conn := pgtest.Connect(t, pgtest.New(t))
		pgtest.Exec(t, conn, change)
		pgtest.Exec(t, conn, "SET enable_nestloop = off")
		pgtest.Exec(t, conn, "SET enable_indexscan = off")
		n := 0
		return pgtest.ScansOfAGrownTable(t, conn, "rate_limit_policy", mode, func() {
			n++
			pgtest.Exec(t, conn, "SELECT rate_limit_ban('n', $1, '1h', '2h', '1h', 'why')", strconv.Itoa(n))
			pgtest.Exec(t, conn, "SELECT rate_limit_policies($1)", n)
		}, func() {
			pgtest.Exec(t, conn, `INSERT INTO rate_limit_policy (name, key, mode, comment)
				SELECT 'n', 'key ' || n, 'deny', 'why' FROM generate_series(1, 5000) AS n`)
		}, func() {
			last := pgtest.Scalar[int64](t, conn, "SELECT max(version) FROM rate_limit_policy_history")
			for range 5 {
				n++
				pgtest.Exec(t, conn, "SELECT rate_limit_ban('n', $1, '1h', '2h', '1h', 'why')", strconv.Itoa(n))
				pgtest.Exec(t, conn, "SELECT rate_limit_policies($1)", last)
			}
		})
	}
	for _, mode := range []string{"auto", "force_generic_plan", "force_custom_plan"} {
		read := scans(mode, "")
		require.Zero(t, read.Sequential, mode)
		require.Less(t, read.IndexRows, int64(1000), mode)
	}
	require.NotZero(t, pgtest.FirstScan(func() int64 {
		return scans("force_generic_plan", "ALTER FUNCTION rate_limit_ban RESET enable_seqscan").Sequential
	}))
}

// Without the triggers, rows are neither checked nor reported. The tests above would notice a missing trigger.
func TestPoliciesWithoutTriggers(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	db := pgtest.New(t)
	var reader policyReader
	reader.read(t, db.Pool)
	pgtest.Exec(t, db.Pool, "ALTER TABLE rate_limit_policy DISABLE TRIGGER USER")
	pgtest.Exec(t, db.Pool, addPolicySQL, "k", "none")
	reader.read(t, db.Pool)
	require.Zero(t, reader.told)
	_, err := db.Pool.Exec(t.Context(), "INSERT INTO rate_limit_policy (name, key, mode) VALUES ('n', 'secret', 'off')")
	require.ErrorContains(t, err, "23502")
}

// Without the triggers, a row may have any time that Postgres allows. Such a row is reported too.
func TestFarTimesOfPoliciesAreTold(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	db := pgtest.New(t)
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, "ALTER TABLE rate_limit_policy DISABLE TRIGGER USER")
	pgtest.Exec(t, tx, `INSERT INTO rate_limit_policy (name, mode, valid_from, valid_until, comment)
		VALUES ('a', 'deny', '4713-01-01 BC', '294276-12-31', 'why'), ('b', 'deny', '294276-12-30', '294276-12-31', 'why')`)
	require.Equal(t, []string{"a t t", "b f t"}, pgtest.Scalar[[]string](t, tx, `
		SELECT array_agg(concat_ws(' ', name, from_us < 0, until_us IS NULL) ORDER BY name) FROM rate_limit_policies()`))
}

// A ban in force does not change. A ban that another row overrides is not in force.
func TestBansBesideOtherPolicies(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	const ban = "SELECT made FROM rate_limit_ban('n', 'k', '1h', '1h', '1h', 'why')"
	pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_policy (name, key, mode, comment) VALUES ('n', 'k', 'deny', 'why')")
	require.False(t, pgtest.Scalar[bool](t, db.Pool, ban))
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, policy, comment)
		VALUES ('n', 'k', 'shadow', 'fixed 1/1h', 'why')`) // a shadow policy does not override a ban
	require.False(t, pgtest.Scalar[bool](t, db.Pool, ban))
	pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_policy (name, key, policy, comment) VALUES ('n', 'k', 'fixed 1/1h', 'why')")
	require.True(t, pgtest.Scalar[bool](t, db.Pool, ban))
	require.False(t, pgtest.Scalar[bool](t, db.Pool, ban))
	for _, sql := range []string{
		"SELECT rate_limit_ban('n', NULL, '1h', '1h', '1h', 'why')", "SELECT rate_limit_ban(NULL, 'k', '1h', '1h', '1h', 'why')",
	} {
		pgtest.Refused(t, db.Pool, sql, sql, "22023")
	}
}

// A policy that begins when it is written has begun for every process that reads it, even if the read began earlier. If
// the function read the clock before the rows, the policy would not have begun.
func TestPoliciesThatAreReadHaveBegun(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	for _, early := range []bool{false, true} {
		db := pgtest.New(t)
		if early {
			pgtest.Rewrite(t, db.Pool, "rate_limit_policies", "clock timestamptz;",
				"clock timestamptz := clock_timestamp();", "clock := clock_timestamp();", "")
		}
		held := pgtest.Begin(t, db)
		pgtest.Exec(t, held, "LOCK TABLE rate_limit_policy_history")
		begun := make(chan bool)
		go func() {
			begun <- pgtest.Scalar[bool](t, db.Pool, "SELECT bool_and(from_us <= clock_us) FROM rate_limit_policies()")
		}()
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		pgtest.Exec(t, held, `INSERT INTO rate_limit_policy (name, mode, valid_from, comment)
			VALUES ('n', 'deny', clock_timestamp(), 'why')`)
		require.NoError(t, held.Commit(t.Context()))
		require.Equal(t, !early, <-begun)
	}
}
