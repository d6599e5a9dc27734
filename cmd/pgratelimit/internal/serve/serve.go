// Package serve has the command serve, which decides for other processes.
package serve

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/service"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// flags are the flags of the command.
type flags struct {
	dir, grpc, http, door          string
	cert, key, clientCA, tokenFile string
	onFailure                      string
	timeout, drain                 time.Duration
	conns                          int32
	insecure, check, demo          bool
	envoy                          service.EnvoyOptions
}

// Command returns the command serve.
func Command(a *cli.App) *cobra.Command {
	f := &flags{}
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Decide for Envoy, for other languages and for many small processes",
		Long: `Serves three kinds of callers, and asks Postgres for all of them together: Envoy, by the protocol
envoy.service.ratelimit.v3 on the address of --grpc; programs in all languages, by HTTP with JSON on the
address of --http, where /openapi.yaml describes it; and programs with the Go library on the address of
--door, by ratelimit.NewService.

The files *.yaml and *.yml in the folder of --config are those of Envoy's reference service, one for each
domain, or have limiters for HTTP, as in the example. Files that change are read again within two seconds,
or on SIGHUP. A file with a mistake leaves the old configuration in force, and the log says what to mend. The
service ends on SIGTERM, after it has answered the requests under way.

An address is host:port, or unix:/path. Addresses that other machines can reach need TLS, a token, or
--insecure. /healthz, /readyz and /metrics are on the address of --http.`,
		Example: `  pgratelimit serve --demo
  pgratelimit serve --config /etc/pgratelimit --door unix:/run/pgratelimit.sock
  pgratelimit serve --config /etc/pgratelimit --check

  # /etc/pgratelimit/limiters.yaml
  limiters:
    - name: login
      policy: sliding 10/1m
      on_failure: deny`,
		Args: cobra.NoArgs,
		RunE: cli.Action(func(ctx context.Context, _ []string) error { return f.run(ctx, a) }),
	}
	set := cmd.Flags()
	set.StringVar(&f.dir, "config", "", "folder with the configuration")
	set.StringVar(&f.grpc, "grpc", "127.0.0.1:8081", `address for Envoy; "" for none`)
	set.StringVar(&f.http, "http", "127.0.0.1:8080", `address for HTTP with JSON; "" for none`)
	set.StringVar(&f.door, "door", "", "address for the Go library")
	set.StringVar(&f.cert, "tls-cert", "", "file with the certificate for TLS, and those of its authorities")
	set.StringVar(&f.key, "tls-key", "", "file with the certificate's key")
	set.StringVar(&f.clientCA, "tls-client-ca", "",
		"file with the authorities of clients, which then need certificates")
	set.StringVar(&f.tokenFile, "token-file", "", "file with the token that callers send")
	set.BoolVar(&f.insecure, "insecure", false, "let other machines in without TLS and token")
	set.StringVar(&f.onFailure, "on-failure", "error",
		`answer while Postgres is away: error, allow, deny, or "local 0.5" for half of the limit`)
	set.DurationVar(&f.timeout, "timeout", 900*time.Millisecond,
		"longest time for a decision; callers should wait a little longer")
	set.DurationVar(&f.drain, "drain", 20*time.Second, "longest time for the requests under way at the end")
	set.Int32Var(&f.conns, "max-conns", 4, "most connections to Postgres for decisions")
	set.BoolVar(&f.envoy.Durable, "durable", false, "keep what Envoy's requests count through a crash of Postgres")
	set.BoolVar(&f.envoy.Headers, "headers", false, "add RateLimit-Limit, -Remaining and -Reset to answers to Envoy")
	set.BoolVar(&f.envoy.DynamicMetadata, "dynamic-metadata", false,
		"add the request and the metadata of its rules to answers to Envoy")
	set.BoolVar(&f.envoy.ShadowMode, "shadow-mode", false, "allow all that Envoy asks, and only count")
	set.BoolVar(&f.check, "check", false, "only say what is wrong in the files of --config")
	set.BoolVar(&f.demo, "demo", false, "start a Postgres and an example configuration, and show how to ask")
	cmd.ValidArgsFunction = cobra.NoFileCompletions
	return cmd
}

// connectTimeout is the timeout of a connection string without connect_timeout. An attempt to connect that hangs keeps
// one of the few places of the pool, also after the network is back.
const connectTimeout = 3 * time.Second

func (f *flags) run(ctx context.Context, a *cli.App) error {
	switch {
	case f.check && f.dir == "":
		return cli.Usage(errors.New("--check needs --config"))
	case f.check:
		if err := service.Check(f.dir); err != nil {
			return err
		}
		fmt.Fprintln(a.Stdout, "The configuration is right.")
		return nil
	case f.demo:
		return runDemo(ctx, a, f)
	}
	config, err := a.Config()
	if err != nil {
		return err
	}
	config.MaxConns = f.conns
	cli.NameSession(config.ConnConfig, "pgratelimit serve")
	if config.ConnConfig.ConnectTimeout == 0 {
		config.ConnConfig.ConnectTimeout = connectTimeout
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	return f.serve(ctx, a, pool, a.Schema, nil)
}

func (f *flags) serve(
	ctx context.Context, a *cli.App, pool *pgxpool.Pool, schema string, started func(grpc, http, door net.Addr),
) error {
	tls, err := f.tls()
	if err != nil {
		return err
	}
	token, err := f.token()
	if err != nil {
		return err
	}
	logger := slog.New(slog.NewTextHandler(a.Stderr, nil))
	if started == nil {
		started = func(grpc, http, door net.Addr) { logAddresses(logger, grpc, http, door) }
	}
	hangup := make(chan os.Signal, 1)
	signal.Reset(syscall.SIGHUP) // so that it does not end the command
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	return service.Run(ctx, service.Options{
		DB: pool, Schema: schema, Dir: f.dir, GRPC: f.grpc, HTTP: f.http, Door: f.door, TLS: tls, Token: token,
		Insecure: f.insecure, OnFailure: f.onFailure, Envoy: f.envoy, Timeout: f.timeout, Drain: f.drain,
		Logger: logger, Hangup: hangup, Started: started,
	})
}

func logAddresses(logger *slog.Logger, grpc, http, door net.Addr) {
	var addresses []any
	for name, addr := range map[string]net.Addr{"grpc": grpc, "http": http, "door": door} {
		if addr != nil {
			addresses = append(addresses, slog.String(name, addr.String()))
		}
	}
	logger.Info("pgratelimit serves", addresses...)
}

// tls returns the configuration for TLS, or nil. The certificate is read again for each connection, so that a new one
// needs no restart.
func (f *flags) tls() (*tls.Config, error) {
	if f.cert == "" && f.key == "" {
		if f.clientCA != "" {
			return nil, cli.Usage(errors.New("--tls-client-ca needs --tls-cert and --tls-key"))
		}
		return nil, nil
	}
	if _, err := tls.LoadX509KeyPair(f.cert, f.key); err != nil {
		return nil, fmt.Errorf("--tls-cert and --tls-key: %w", err)
	}
	config := &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(f.cert, f.key)
			return &pair, err
		},
	}
	if f.clientCA != "" {
		pem, err := os.ReadFile(f.clientCA)
		if err != nil {
			return nil, fmt.Errorf("--tls-client-ca: %w", err)
		}
		config.ClientCAs = x509.NewCertPool()
		if !config.ClientCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--tls-client-ca: %s has no certificate in PEM form", f.clientCA)
		}
		config.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return config, nil
}

const leastToken = 16 // bytes

func (f *flags) token() (string, error) {
	if f.tokenFile == "" {
		return "", nil
	}
	file, err := os.Open(f.tokenFile)
	if err != nil {
		return "", fmt.Errorf("--token-file: %w", err)
	}
	defer file.Close()
	content, err := io.ReadAll(io.LimitReader(file, 4097))
	token := strings.TrimSpace(string(content))
	switch {
	case err != nil:
		return "", fmt.Errorf("--token-file: %w", err)
	case len(token) < leastToken || len(content) > 4096 || strings.ContainsAny(token, " \t\r\n"):
		return "", fmt.Errorf("--token-file: %s must have one line of %d to 4096 characters without spaces, "+
			"such as the output of: openssl rand -hex 32", f.tokenFile, leastToken)
	}
	return token, nil
}
