package main

import (
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// proxy is a database that is to be a proxy of others on the same server.
type proxy struct {
	*pgtest.DB

	shards      []*pgtest.DB
	connections []string
	user        string
}

// newProxy makes the databases. It skips the test where the server has no PL/Proxy, unless RATELIMIT_TEST_PLPROXY says
// that it has.
func newProxy(t *testing.T, n int) *proxy {
	t.Helper()
	p := &proxy{DB: pgtest.Empty(t)}
	available := pgtest.Scalar[bool](t, p.Pool, `SELECT rolsuper AND EXISTS (
		SELECT FROM pg_available_extensions WHERE name = 'plproxy') FROM pg_roles WHERE rolname = current_user`)
	if !available && os.Getenv("RATELIMIT_TEST_PLPROXY") == "" {
		t.Skip("PL/Proxy: install it (Debian: postgresql-15-plproxy), and test as a superuser, or set RATELIMIT_TEST_PLPROXY")
	}
	to := p.Pool.Config().ConnConfig
	p.user = to.User
	for range n {
		shard := pgtest.New(t)
		p.shards = append(p.shards, shard)
		p.connections = append(p.connections, fmt.Sprintf("host=%s port=%d dbname=%s",
			keywordValue(to.Host), to.Port, shard.Pool.Config().ConnConfig.Database))
	}
	return p
}

// set is the command line that makes it a proxy.
func (p *proxy) set(t *testing.T, args ...string) outcome {
	t.Helper()
	cmd := append([]string{"shard", "set", "--yes", "--user", p.user}, args...)
	return invokeWith(t, []string{passwordVariable + "=" + p.Pool.Config().ConnConfig.Password}, p.URL,
		append(cmd, p.connections...)...)
}

// made is a proxy that works.
func madeProxy(t *testing.T, n int) *proxy {
	t.Helper()
	p := newProxy(t, n)
	p.set(t).done(t)
	return p
}

func TestShardSet(t *testing.T) {
	t.Parallel()

	p := newProxy(t, 4)
	states := decode[[]shardState](t, p.set(t, "--json"))
	require.Len(t, states, 4)
	for i, s := range states {
		require.Equal(t, i, s.Place)
		require.Equal(t, &shardIs{i, 4}, s.Is)
		require.Equal(t, p.connections[i], s.Connection)
		require.Empty(t, s.Wrong)
	}
}
