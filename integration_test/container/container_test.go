// Package container runs tests of the library against a Postgres in a container.
package container

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
)

// TestInContainer runs tests of the library against a Postgres in a container, of the image RATELIMIT_TEST_IMAGE. They
// run side by side themselves, so this test does not run beside others.
//
//nolint:paralleltest // see above
func TestInContainer(t *testing.T) {
	ctx := t.Context()
	provider, err := testcontainers.NewDockerProvider()
	if err == nil {
		defer provider.Close()
		err = provider.Health(ctx)
	}
	if err != nil {
		t.Skipf("Postgres in a container: start a Docker engine (%v)", err)
	}

	image := os.Getenv("RATELIMIT_TEST_IMAGE")
	if image == "" {
		image = "postgres:17"
	}
	container, err := postgres.Run(ctx, image,
		postgres.WithDatabase("ratelimit"), postgres.WithUsername("ratelimit"), postgres.WithPassword("secret"),
		postgres.BasicWaitStrategies(),
		testcontainers.WithCmdArgs("-c", "max_connections=300", "-c", "fsync=off"),
		// In memory, where databases are made faster, and no write waits for a busy disk.
		testcontainers.WithTmpfs(map[string]string{"/var/lib/postgresql/data": "rw"}),
	)
	testcontainers.CleanupContainer(t, container)
	require.NoError(t, err)
	url, err := container.ConnectionString(ctx, "sslmode=disable")
	require.NoError(t, err)

	// A server that somebody else has started differs in how it is reached, and in who uses it. That is what tests of
	// these names meet: logins, policies that are announced, statements side by side. The others run elsewhere.
	suite := exec.CommandContext(ctx, "go", "test", "-count=1", "-timeout=20m",
		"-run=Policies|Connection|Lease|Equal|ManyAtOnce|OwnDatabase", ".", "./migrations", "./internal/pgtest")
	suite.Dir = "../.."
	suite.Env = append(os.Environ(), "RATELIMIT_TEST_DATABASE_URL="+url)
	output, err := suite.CombinedOutput()
	t.Logf("%s\n%s", suite, output)
	failed := regexp.MustCompile(`(?m)^\s*--- FAIL: .*$`).FindAllString(string(output), -1)
	require.NoError(t, err, strings.Join(failed, "\n"))
}
