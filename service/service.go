// Package service is the server of the command pgratelimit serve. It decides for Envoy, for programs in other
// languages, and for many small processes, and asks Postgres for all of them together.
package service

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/livepage"
	"github.com/pgratelimit/ratelimit/otelratelimit"
	"github.com/pgratelimit/ratelimit/service/internal/envoy"
	"github.com/pgratelimit/ratelimit/service/internal/settings"
)

// Options say what a service listens on, and which database it asks.
type Options struct {
	DB     *pgxpool.Pool
	Schema string // the schema of the tables; "" means that search_path finds it
	Dir    string // the configuration directory; "" for none
	// GRPC, HTTP and Door are addresses of the form host:port or unix:/path, or "" for none. GRPC is for Envoy, HTTP
	// for programs in other languages, and Door for the Go library: see [ratelimit.NewService].
	GRPC, HTTP, Door string
	TLS              *tls.Config // nil for plain text
	// Token is what callers must send, or "". Over HTTP and gRPC it is "authorization: Bearer TOKEN".
	Token    string
	Insecure bool // allows addresses that other machines reach without TLS and Token
	// OnFailure is the answer while Postgres is away, for limiters that do not name one: error, allow, deny, or local
	// with a share, as in local 0.5. For Envoy, local is an error, so that its failure_mode_deny decides.
	OnFailure string
	Envoy     EnvoyOptions
	Timeout   time.Duration // as ratelimit.ClientConfig.Timeout; 0 for its default
	Drain     time.Duration // the longest time for requests under way when the service ends
	Logger    *slog.Logger
	Hangup    <-chan os.Signal                // has a value when all files are to be read again
	Started   func(grpc, http, door net.Addr) // called once all listeners are open; may be nil
}

// EnvoyOptions say how Envoy is answered. The reference service has environment variables for all but Durable.
type EnvoyOptions struct {
	Durable         bool // keep the counts in rate_limit_durable, which survives a crash of Postgres
	Headers         bool // add the headers RateLimit-Limit, -Remaining and -Reset
	DynamicMetadata bool // add the request and the metadata of its rules
	ShadowMode      bool // answer OK to all requests, and only count
}

// service is a running service.
type service struct {
	Options
	client   *ratelimit.Client
	config   configuration
	envoy    *envoy.Server
	metrics  *metrics
	page     *livepage.Page
	draining atomic.Bool
	answered atomic.Bool // whether the database has answered once
}

// Run serves until ctx ends. Then it refuses new connections, answers the requests under way, and returns. Errors: what
// is wrong in the files or with the addresses.
func Run(ctx context.Context, o Options) error {
	if err := o.checkExposure(); err != nil {
		return err
	}
	s := &service{Options: o}
	if err := s.start(); err != nil {
		return err
	}
	return s.run(ctx)
}

func (s *service) start() (err error) {
	if s.metrics, err = newMetrics(); err != nil {
		return err
	}
	onFailure, err := settings.ParseFailureMode(cmp.Or(s.OnFailure, "error"))
	if err != nil {
		return err
	}
	measures, err := otelratelimit.New(s.metrics.meter)
	if err != nil {
		return err
	}
	policies, err := ratelimit.NewPolicies(s.DB, ratelimit.PoliciesConfig{Schema: s.Schema, Logger: s.Logger})
	if err != nil {
		return err
	}
	s.page = livepage.New(livepage.Config{Policies: policies, DB: s.DB, Schema: s.Schema})
	s.client, err = ratelimit.NewClient(s.DB, ratelimit.ClientConfig{
		Schema: s.Schema, Timeout: s.Timeout, Logger: s.Logger,
		Observer: ratelimit.Observers(measures, s.page.Observer()),
	})
	if err != nil {
		return err
	}
	s.envoy = envoy.New(s.envoyOptions(), &envoy.Config{})
	s.config = configuration{
		dir: s.Dir, client: s.client, policies: policies, onFailure: onFailure, envoy: s.envoy, logger: s.Logger,
	}
	s.config.limiters.Store(&map[string]*ratelimit.Limiter{})
	s.metrics.registry.MustRegister(envoyStats{s.envoy})
	s.metrics.gauge("ratelimit_service_configuration_broken",
		"1 if the files last read have a mistake, so that older ones are in force.", func() float64 {
			if s.config.broken.Load() {
				return 1
			}
			return 0
		})
	s.metrics.gauge("ratelimit_service_pool_in_use", "How many connections of the pool are in use.", func() float64 {
		return float64(s.DB.Stat().AcquiredConns())
	})
	s.metrics.gauge("ratelimit_service_pool_size", "How many connections to Postgres the pool may have.",
		func() float64 { return float64(s.DB.Stat().MaxConns()) })
	return s.metrics.tables(s.DB, s.Schema, s.Logger)
}

func (s *service) envoyOptions() envoy.Options {
	o := envoy.Options{
		Client: s.client, Durable: s.Envoy.Durable, DynamicMetadata: s.Envoy.DynamicMetadata,
		ShadowMode: s.Envoy.ShadowMode, Logger: s.Logger,
	}
	switch s.OnFailure {
	case "allow":
		o.OnFailure = envoy.Allow
	case "deny":
		o.OnFailure = envoy.Deny
	}
	if s.Envoy.Headers {
		o.Headers = envoy.DefaultHeaders()
	}
	return o
}

// run opens the listeners, serves until ctx ends or a listener fails, and drains.
func (s *service) run(ctx context.Context) error {
	if s.Dir != "" {
		if err := s.config.load(ctx, true); err != nil {
			return err
		}
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var work sync.WaitGroup
	defer work.Wait()
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	work.Go(func() { s.config.policies.Run(background) })
	if s.Dir != "" {
		work.Go(func() { s.config.watch(background, s.Hangup) })
	}
	work.Go(func() { s.awaitDatabase(background) })

	var servers []server
	var addresses [3]net.Addr
	for i, l := range []struct {
		flag, address, free string // free is an address for the error if address is in use
		door                string
		serve               func(net.Listener) server
	}{
		{"--grpc", s.GRPC, "127.0.0.1:9081", doorGRPC, s.serveGRPC},
		{"--http", s.HTTP, "127.0.0.1:9080", doorHTTP, s.serveHTTP},
		{"--door", s.Door, "127.0.0.1:9082", doorGo, s.serveDoor},
	} {
		if l.address == "" {
			continue
		}
		listener, err := listen(l.address)
		if errors.Is(err, syscall.EADDRINUSE) {
			err = fmt.Errorf("%w; give another address, such as %s %s", err, l.flag, l.free)
		}
		if err != nil {
			stop(fmt.Errorf("%s: %w", l.flag, err))
			break
		}
		addresses[i] = listener.Addr()
		server := l.serve(counted{listener, s.metrics.connections.WithLabelValues(l.door)})
		servers = append(servers, server)
		work.Go(func() {
			if err := server.run(); err != nil {
				stop(fmt.Errorf("%s: %w", l.flag, err))
			}
		})
	}
	if ctx.Err() == nil && s.Started != nil {
		s.Started(addresses[0], addresses[1], addresses[2])
	}
	<-ctx.Done()
	cause := context.Cause(ctx)
	s.drain(servers)
	if errors.Is(cause, context.Canceled) {
		return nil
	}
	return cause
}

// server is one of the servers of a service.
type server struct {
	run   func() error              // serves until drain is called; returns an error if it ended on its own
	drain func(ctx context.Context) // refuses new requests, and answers those under way until ctx ends
}

// drain ends all servers at once.
func (s *service) drain(servers []server) {
	s.draining.Store(true)
	ctx, cancel := context.WithTimeout(context.Background(), s.Drain)
	defer cancel()
	var all sync.WaitGroup
	for _, one := range servers {
		all.Go(func() { one.drain(ctx) })
	}
	all.Wait()
}

// awaitDatabase waits until the database has answered once, for /readyz. After that, OnFailure is the answer while it
// is away, so the service stays ready.
func (s *service) awaitDatabase(ctx context.Context) {
	for ctx.Err() == nil {
		err := s.DB.Ping(ctx)
		if err == nil {
			s.answered.Store(true)
			return
		}
		s.Logger.ErrorContext(ctx, "ratelimit: the database does not answer yet", "error", err)
		select {
		case <-ctx.Done():
		case <-time.After(pingPause):
		}
	}
}

// pingPause is the pause between two attempts to reach the database when the service starts.
const pingPause = 3 * time.Second

// These are the limits for callers of all listeners.
const (
	readTimeout    = 10 * time.Second // for a request's header, and for TLS
	idleTimeout    = 5 * time.Minute
	maxHeader      = 16 << 10
	maxStreams     = 1000 // requests under way on one gRPC connection
	leastKeepalive = 10 * time.Second
)

func (s *service) serveGRPC(l net.Listener) server {
	options := []grpc.ServerOption{
		grpc.MaxRecvMsgSize(envoy.MaxMessage), grpc.MaxConcurrentStreams(maxStreams),
		grpc.ConnectionTimeout(readTimeout),
		grpc.MaxHeaderListSize(maxHeader), grpc.ChainUnaryInterceptor(s.metrics.interceptor, s.authorize),
		grpc.StreamInterceptor(s.authorizeStream),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Minute, Timeout: readTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime: leastKeepalive, PermitWithoutStream: true,
		}),
	}
	if s.TLS != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(s.TLS)))
	}
	g := grpc.NewServer(options...)
	state := s.envoy.Register(g)
	reflection.Register(g) // for grpcurl
	return server{
		run: func() error { return g.Serve(l) },
		drain: func(ctx context.Context) {
			state.Shutdown()
			stop := context.AfterFunc(ctx, g.Stop)
			defer stop()
			g.GracefulStop()
		},
	}
}

// drainQuiet is how long connections of HTTP must be silent at the end, before they are closed. A client that sends a
// request while the connection is being closed could not know whether it was answered.
const drainQuiet = 2 * time.Second

func (s *service) serveHTTP(l net.Listener) server {
	var open, usedAt atomic.Int64 // how many connections there are; when one was last used, in Unix nanoseconds
	handler := s.handler()
	web := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if s.draining.Load() {
				w.Header().Set("Connection", "close") // so that the next request goes elsewhere
			}
			handler.ServeHTTP(w, r)
		}),
		ConnState: func(_ net.Conn, state http.ConnState) {
			switch usedAt.Store(time.Now().UnixNano()); state {
			case http.StateNew:
				open.Add(1)
			case http.StateClosed, http.StateHijacked:
				open.Add(-1)
			}
		},
		ReadHeaderTimeout: readTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(s.Logger.Handler(), slog.LevelDebug), // what broken clients do
	}
	if s.TLS != nil {
		l = tls.NewListener(l, s.TLS)
	}
	return server{
		run: func() error {
			if err := web.Serve(l); !s.draining.Load() {
				return err
			}
			return nil
		},
		drain: func(ctx context.Context) {
			_ = l.Close()
			s.page.Close() // its pages would stay open
			usedAt.Store(time.Now().UnixNano())
			tick := time.NewTicker(drainQuiet / 100)
			defer tick.Stop()
			for ctx.Err() == nil && open.Load() > 0 && time.Since(time.Unix(0, usedAt.Load())) < drainQuiet {
				<-tick.C
			}
			if web.Shutdown(ctx) != nil {
				_ = web.Close()
			}
		},
	}
}

func (s *service) serveDoor(l net.Listener) server {
	if s.TLS != nil {
		l = tls.NewListener(l, s.TLS)
	}
	ctx, end := context.WithCancel(context.Background())
	ended := make(chan struct{})
	return server{
		run: func() error {
			defer close(ended)
			return s.client.Serve(ctx, l, ratelimit.ServeConfig{Token: s.Token, Logger: s.Logger})
		},
		drain: func(ctx context.Context) {
			end()
			select {
			case <-ended:
			case <-ctx.Done():
			}
		},
	}
}
