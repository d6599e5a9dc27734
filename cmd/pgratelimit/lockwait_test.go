package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// If a command waits for a lock for a second, it prints who holds the lock. The command does not print the holder's
// statement.
func TestNoCommandWaitsInSilence(t *testing.T) {
	t.Parallel()
	testWaits(t, map[string]string{
		"migrate up":                      "LOCK TABLE rate_limit_goose_version IN ACCESS EXCLUSIVE MODE",
		"limits":                          wholeTable,
		"policy unset login --key secret": "DELETE FROM rate_limit_policy WHERE key = 'secret'",
		"reset login --all -y":            "SELECT rate_limit_allow('login', 'secret', 'fixed 1/1h')",
	})
}

func TestThoroughNoCommandWaitsInSilence(t *testing.T) {
	t.Parallel()
	testWaits(t, map[string]string{
		"migrate status":         "LOCK TABLE rate_limit_goose_version IN ACCESS EXCLUSIVE MODE",
		"migrate down --to 0 -y": "SELECT rate_limit_allow('login', 'secret', 'fixed 1/1h')",
		"slots login":            "LOCK TABLE rate_limit_durable_hold IN ACCESS EXCLUSIVE MODE",
		"doctor":                 "LOCK TABLE rate_limit_policy IN ACCESS EXCLUSIVE MODE",
		"policy set login --key b --off --comment why": "LOCK TABLE rate_limit_policy_history IN SHARE MODE",
		"ban login b --for 1h --comment why":           "LOCK TABLE rate_limit_policy IN SHARE MODE",
		"top login --policy=fixed_1/1h":                wholeTable,
		"policy history":                               "LOCK TABLE rate_limit_policy_history IN ACCESS EXCLUSIVE MODE",
		"policy compare login":                         "LOCK TABLE rate_limit_shadow IN ACCESS EXCLUSIVE MODE",
	})
}

const wholeTable = "LOCK TABLE rate_limit_ephemeral IN ACCESS EXCLUSIVE MODE"

// testWaits runs command lines while another session holds a lock. holds has the other session's statement for each.
func testWaits(t *testing.T, holds map[string]string) {
	t.Helper()
	for line, hold := range holds {
		t.Run(line, func(t *testing.T) {
			t.Parallel()

			db := pgtest.New(t)
			pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, comment) VALUES ('login', 'secret', 'off', 'why');
				SELECT rate_limit_allow('login', 'secret', 'fixed 1/1h')`, pgx.QueryExecModeSimpleProtocol)
			holder, err := pgx.Connect(t.Context(), urlWith(t, db, "application_name=night%20shift"))
			require.NoError(t, err)
			tx, err := holder.Begin(t.Context())
			require.NoError(t, err)
			pgtest.Exec(t, tx, hold)

			args := strings.Fields(line)
			if args[0] != "migrate" {
				args = append(args, "--timeout=10m")
			}
			for i := range args {
				args[i] = strings.ReplaceAll(args[i], "_", " ")
			}
			cmd := command(t, db.URL, args...)
			said := new(testkit.Journal)
			cmd.Stderr, cmd.Stdout = said, new(bytes.Buffer)
			require.NoError(t, cmd.Start())
			want := fmt.Sprintf("pgratelimit: waiting for a lock of process %d (application \"night shift\", idle in transaction, since ",
				holder.PgConn().PID())
			testkit.WaitUntil(t, func() bool { return strings.Contains(said.String(), want) }, "%s", said)
			require.NoError(t, tx.Rollback(t.Context()))
			_ = cmd.Wait()
			require.NotContains(t, said.String(), "secret")
			require.NotContains(t, said.String(), "LOCK TABLE")
		})
	}
}
