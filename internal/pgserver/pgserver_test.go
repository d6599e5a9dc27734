//go:build unix

package pgserver

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestServer walks one server through its life; another for each step would take most of the time.
func TestServer(t *testing.T) {
	t.Parallel()

	server := startServer(t, Config{})
	url := server.URL()

	t.Run("answers", func(t *testing.T) {
		require.True(t, server.Owned())
		require.Regexp(t, `^PostgreSQL \d+\S* from (/|the npm package )\S.*, started on 127\.0\.0\.1:\d+$`, server.Describe())
		require.Equal(t, "postgres/on", query(t, url, "SELECT current_user || '/' || current_setting('is_superuser')"))
		require.Equal(t, "off", query(t, url, "SHOW fsync"))
		require.Equal(t, server.DataDir(), query(t, url, "SHOW data_directory"))
		require.ErrorIs(t, server.Restart(t.Context()), ErrRunning)

		pids, err := server.PIDs()
		require.NoError(t, err)
		require.Equal(t, server.PID(), pids[0])
		checkpointer, err := strconv.Atoi(
			query(t, url, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'"),
		)
		require.NoError(t, err)
		require.Contains(t, pids[1:], checkpointer)
	})

	t.Run("is used by its URL", func(t *testing.T) {
		theirs, err := Start(t.Context(), Config{URL: url})
		require.NoError(t, err)

		require.False(t, theirs.Owned())
		require.Equal(t, url, theirs.URL())
		require.Regexp(t, `^PostgreSQL \d+\S* from the given URL, at 127\.0\.0\.1:\d+$`, theirs.Describe())
		require.Empty(t, theirs.DataDir())
		require.Zero(t, theirs.PID())
		for name, err := range map[string]error{
			"Stop":    theirs.Stop(t.Context(), Fast),
			"Kill":    theirs.Kill(),
			"Restart": theirs.Restart(t.Context()),
			"Freeze":  theirs.Freeze(),
			"Thaw":    theirs.Thaw(),
		} {
			require.ErrorIs(t, err, ErrNotOwned, name)
		}

		require.NoError(t, theirs.Close())
		require.Equal(t, "1", query(t, url, "SELECT 1"))
	})

	t.Run("keeps its data over stop and restart", func(t *testing.T) {
		query(t, url, "CREATE TABLE kept (n int)")
		for i, mode := range []Mode{Fast, Smart, Immediate} {
			query(t, url, fmt.Sprintf("INSERT INTO kept VALUES (%d)", i))
			query(t, url, "CHECKPOINT") // without Fsync an immediate stop loses what is not on disk
			pids, err := server.PIDs()
			require.NoError(t, err)

			require.NoError(t, server.Stop(t.Context(), mode))
			requireGone(t, pids)
			require.Zero(t, server.PID())
			require.NoError(t, server.Stop(t.Context(), mode), "a second stop")

			require.NoError(t, server.Restart(t.Context()))
			require.Equal(t, url, server.URL())
			require.Equal(t, strconv.Itoa(i+1), query(t, url, "SELECT count(*) FROM kept"))
		}
	})

	t.Run("frozen, accepts and never answers", func(t *testing.T) {
		before := connect(t, url)
		require.NoError(t, server.Freeze())
		require.NoError(t, server.Freeze(), "a second freeze")

		short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := before.Exec(short, "SELECT 1")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		conn, err := net.Dial("tcp", address(portOf(t, url)))
		require.NoError(t, err, "a frozen server is not a stopped one")
		require.NoError(t, conn.Close())
		short, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err = attempt(short, url, "")
		require.ErrorIs(t, err, context.DeadlineExceeded)

		require.NoError(t, server.Thaw())
		require.Equal(t, "1", query(t, url, "SELECT 1"))
		require.NoError(t, server.Thaw(), "a second thaw")

		require.NoError(t, server.Freeze())
		require.NoError(t, server.Stop(t.Context(), Fast))
		require.NoError(t, server.Restart(t.Context()))
	})

	t.Run("waits for its clients in a smart stop", func(t *testing.T) {
		client := connect(t, url)
		short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, server.Stop(short, Smart), context.DeadlineExceeded)
		require.NotZero(t, server.PID())

		require.NoError(t, client.Close(t.Context()))
		require.Eventually(t, func() bool { return server.PID() == 0 }, patience, poll)
	})

	t.Run("not running, refuses its URL at once", func(t *testing.T) {
		_, err := Start(t.Context(), Config{URL: "postgres://me:secret@" + address(portOf(t, url)) + "/"})
		require.ErrorContains(t, err, "the given URL")
		require.NotContains(t, err.Error(), "secret")
	})

	t.Run("closes while frozen", func(t *testing.T) {
		require.NoError(t, server.Restart(t.Context()))
		pids, err := server.PIDs()
		require.NoError(t, err)
		require.NoError(t, server.Freeze())

		began := time.Now()
		require.NoError(t, server.Close())
		require.Less(t, time.Since(began), 5*time.Second, "frozen processes have held up the end")
		requireGone(t, pids)
		require.NoDirExists(t, filepath.Dir(server.DataDir()))
		require.NoError(t, server.Close(), "a second close")
		require.ErrorIs(t, server.Restart(t.Context()), ErrClosed)
	})
}

func TestKillThenRestartRecoversCommittedData(t *testing.T) {
	t.Parallel()

	server := startServer(t, Config{Fsync: true, Settings: map[string]string{
		"max_connections":  "33",
		"application_name": `it's a \ test`,
	}})
	url := server.URL()
	for name, want := range map[string]string{
		"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on",
		"max_connections": "33", "application_name": `it's a \ test`,
	} {
		require.Equal(t, want, query(t, url, fmt.Sprintf("SELECT reset_val FROM pg_settings WHERE name = '%s'", name)))
	}

	query(t, url, "CREATE TABLE kept AS SELECT * FROM generate_series(1, 1000)")
	open := connect(t, url)
	_, err := open.Exec(t.Context(), "BEGIN; DELETE FROM kept")
	require.NoError(t, err)
	busy := connect(t, url) // a busy backend does not notice by itself that the postmaster is gone
	busyErr := make(chan error, 1)
	go func() {
		_, err := busy.Exec(t.Context(), "SELECT count(*) FROM generate_series(1, 1e12::bigint)")
		busyErr <- err
	}()
	require.Eventually(t, func() bool {
		return query(t, url, "SELECT count(*) FROM pg_stat_activity WHERE state = 'active'") == "2"
	}, patience, poll)

	pids, err := server.PIDs()
	require.NoError(t, err)
	require.NoError(t, server.Kill())
	requireGone(t, pids)
	require.Error(t, <-busyErr)
	require.NoError(t, server.Kill(), "a second kill")

	require.NoError(t, server.Restart(t.Context()))
	require.Equal(t, "1000", query(t, url, "SELECT count(*) FROM kept"))

	memory := sharedMemoryID(t, server.DataDir())
	require.True(t, sharedMemoryExists(t, memory))
	require.NoError(t, server.Kill())
	require.NoError(t, server.Close())
	require.False(t, sharedMemoryExists(t, memory), "kill -9 leaves shared memory, Close must not")
}
