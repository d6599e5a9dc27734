// Package container runs tests of the library against a Postgres in a container.
package container

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/modules/postgres"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// needEngine skips a test if there is no Docker engine. It returns the Postgres image.
func needEngine(t *testing.T) (image string) {
	t.Helper()
	provider, err := testcontainers.NewDockerProvider()
	if err == nil {
		defer provider.Close()
		err = provider.Health(t.Context())
	}
	if err != nil {
		t.Skipf("Postgres in a container: start a Docker engine (%v)", err)
	}
	return cmp.Or(os.Getenv("RATELIMIT_TEST_IMAGE"), "postgres:17")
}

// TestInContainer runs tests of the library against a Postgres in a container of the image RATELIMIT_TEST_IMAGE. These
// tests run in parallel, so no other test runs beside TestInContainer.
//
//nolint:paralleltest // see above
func TestInContainer(t *testing.T) {
	ctx := t.Context()
	image := needEngine(t)
	container, err := postgres.Run(ctx, image,
		postgres.WithDatabase("ratelimit"), postgres.WithUsername("ratelimit"), postgres.WithPassword("secret"),
		postgres.BasicWaitStrategies(),
		testcontainers.WithCmdArgs("-c", "max_connections=300", "-c", "fsync=off"),
		// In memory, databases are created faster, and no write waits for a busy disk.
		testcontainers.WithTmpfs(map[string]string{"/var/lib/postgresql/data": "rw"}),
	)
	testcontainers.CleanupContainer(t, container)
	require.NoError(t, err)
	url, err := container.ConnectionString(ctx, "sslmode=disable")
	require.NoError(t, err)

	// A server that the tests did not start is reached in another way, and has other users. Tests with these names
	// depend on that: logins, notifications of policies, and concurrent statements. Other tests do not.
	suite := exec.CommandContext(ctx, "go", "test", "-count=1", "-timeout=20m",
		"-run=Policies|Connection|Lease|Equal|ManyAtOnce|OwnDatabase", ".", "./migrations", "./internal/pgtest")
	suite.Dir = "../.."
	suite.Env = append(os.Environ(), "RATELIMIT_TEST_DATABASE_URL="+url)
	output, err := suite.CombinedOutput()
	t.Logf("%s\n%s", suite, output)
	failed := regexp.MustCompile(`(?m)^\s*--- FAIL: .*$`).FindAllString(string(output), -1)
	require.NoError(t, err, strings.Join(failed, "\n"))
}

// If pgserver runs a server in Docker, it can do the same as a server from installed programs, and ends with its owner.
//
//nolint:paralleltest // other tests must not run beside TestInContainer
func TestThrowawayServerInDocker(t *testing.T) {
	config := pgserver.Config{Image: needEngine(t), Fsync: true, Settings: map[string]string{"max_connections": "9"}}
	server, err := pgserver.Start(context.Background(), config)
	require.NoError(t, err)
	defer server.Close()
	if os.Getenv("PGSERVER_TEST_OWNER") != "" {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	require.Contains(t, server.Describe(), " from the Docker image "+config.Image+", started on 127.0.0.1:")
	query := func(sql string) (value string) {
		conn, err := pgx.Connect(t.Context(), server.URL())
		require.NoError(t, err)
		defer conn.Close(context.Background())
		require.NoError(t, conn.QueryRow(t.Context(), sql).Scan(&value))
		return value
	}
	require.Equal(t, "9", query("SHOW max_connections"))
	for i, end := range []func() error{
		server.Kill,
		func() error { return server.Stop(t.Context(), pgserver.Smart) },
		func() error { require.NoError(t, server.Freeze()); return server.Stop(t.Context(), pgserver.Fast) },
		func() error { require.NoError(t, server.Freeze()); return server.Kill() },
	} {
		query(fmt.Sprintf("SELECT lo_create(%d)::text", i+1))
		require.NoError(t, end())
		require.NoError(t, end(), "again")
		require.NoError(t, server.Restart(t.Context()))
		require.Equal(t, strconv.Itoa(i+1), query("SELECT count(*)::text FROM pg_largeobject_metadata"))
	}
	require.NoError(t, server.Close())

	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestThrowawayServerInDocker$")
	child.Env = append(os.Environ(), "PGSERVER_TEST_OWNER=1")
	require.Error(t, child.Run())
	testkit.WaitUntil(t, func() bool {
		left, err := exec.CommandContext(t.Context(), "docker", "ps", "-aq", "--filter", "name=^pgserver-").Output()
		return err == nil && len(left) == 0
	})
}
