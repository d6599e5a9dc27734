package serve

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/migrations"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

//go:embed example/*.yaml
var example embed.FS

const setUpTimeout = 20 * time.Second

// runDemo serves an example configuration with a Postgres of its own until ctx ends, and then removes both.
func runDemo(ctx context.Context, a *cli.App, f *flags) (err error) {
	if f.dir != "" {
		return cli.Usage(errors.New("--demo has a configuration of its own; leave --config out"))
	}
	server, err := pgserver.Start(ctx, pgserver.Config{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	dir, err := os.MkdirTemp("", "pgratelimit-demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := writeExample(dir); err != nil {
		return err
	}
	config, err := pgxpool.ParseConfig(server.URL())
	if err != nil {
		return err
	}
	config.MaxConns = f.conns
	cli.NameSession(config.ConnConfig, "pgratelimit serve")
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	setUp, cancel := context.WithTimeout(ctx, setUpTimeout)
	defer cancel()
	if err := migrations.Up(setUp, pool); err != nil {
		return err
	}
	demo := *f
	demo.dir = dir
	return demo.serve(ctx, a, pool, "", func(grpc, http, _ net.Addr) {
		fmt.Fprintf(a.Stdout, `%[1]s
It is gone when you press Ctrl-C, and so is the configuration in %[2]s,
which you may change meanwhile.

A page that shows what is decided, as it is decided:

  http://%[3]s/

Ten logins a minute:

  curl -i http://%[3]s/v1/ask --json '{"limiter": "login", "key": "user:123"}'

Three requests a minute from each address, as Envoy asks:

  grpcurl -plaintext -d '{"domain": "shop", "descriptors": [{"entries":
    [{"key": "remote_address", "value": "192.0.2.1"}]}]}' \
    %[4]s envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit

The same without grpcurl:

  curl -i http://%[3]s/json -d '{"domain": "shop", "descriptors": [{"entries":
    [{"key": "remote_address", "value": "192.0.2.1"}]}]}'
`, server.Describe(), dir, http, grpc)
	})
}

// writeExample writes the example configuration into a folder.
func writeExample(dir string) error {
	files, err := fs.ReadDir(example, "example")
	if err != nil {
		return err
	}
	for _, file := range files {
		content, err := fs.ReadFile(example, "example/"+file.Name())
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, file.Name()), content, 0o600); err != nil {
			return err
		}
	}
	return nil
}
