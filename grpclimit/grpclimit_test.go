package grpclimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/grpclimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

// noon is the time of the tests' clocks. The clocks stand still, so retry times are exact.
var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// twoAnHour returns a limiter of two calls an hour.
func twoAnHour(t *testing.T, db ratelimit.DBTX) patient {
	t.Helper()
	return patient{limitertest.New(t, db, ratelimit.Config{
		Name: "login", Policy: ratelimit.FixedWindow{Limit: 2, Window: time.Hour}, OnFailure: ratelimit.ReturnError(),
	}, ratelimit.ClientConfig{Test: limitertest.Frozen(noon)})}
}

// onBoth runs a test on Postgres and on the database in memory.
func onBoth(t *testing.T, test func(t *testing.T, db ratelimit.DBTX)) {
	t.Run("Postgres", func(t *testing.T) {
		t.Parallel()
		test(t, pgtest.New(t).Pool)
	})
	t.Run("in memory", func(t *testing.T) {
		t.Parallel()
		test(t, ratelimittest.NewDB())
	})
}

// The server in docs/cookbook.md charges failed calls, and does not charge successful calls.
func TestRecipe(t *testing.T) {
	t.Parallel()

	onBoth(t, func(t *testing.T, db ratelimit.DBTX) {
		conn := connect(t, newServer(twoAnHour(t, db)))
		require.Equal(t, []codes.Code{
			codes.OK, codes.OK, codes.OK,
			codes.Unauthenticated, codes.OK, codes.Unauthenticated,
			codes.ResourceExhausted, codes.ResourceExhausted,
		}, codesOf(t, conn, right, right, right, "wrong", right, "wrong", "wrong", right))
		err := call(t.Context(), conn, right)
		require.Equal(t, time.Hour, retryDelay(t, err))
		require.Equal(t, "too many calls", status.Convert(err).Message())

		// Other methods are not limited.
		for range 3 {
			require.Equal(t, []string{"EOF"}, watchFor(t, conn))
		}
	})
}

// watchFor sends texts through one stream, and returns the answers and how the stream ended.
func watchFor(t *testing.T, conn *grpc.ClientConn, texts ...string) (got []string) {
	t.Helper()
	stream, err := conn.NewStream(t.Context(), &description.Streams[0], watch)
	require.NoError(t, err)
	for _, text := range texts {
		if err := stream.SendMsg(wrapperspb.String(text)); err != nil {
			require.ErrorIs(t, err, io.EOF) // the server has answered already
		}
	}
	require.NoError(t, stream.CloseSend())
	for {
		message := &wrapperspb.StringValue{}
		switch err := stream.RecvMsg(message); {
		case errors.Is(err, io.EOF):
			return append(got, "EOF")
		case status.Code(err) == codes.ResourceExhausted:
			require.Equal(t, time.Hour, retryDelay(t, err))
			fallthrough
		case err != nil:
			return append(got, status.Code(err).String())
		}
		got = append(got, message.GetValue())
	}
}

// A stream is decided when it opens, however many messages it has. It ends with the code of its handler.
func TestStream(t *testing.T) {
	t.Parallel()

	onBoth(t, func(t *testing.T, db ratelimit.DBTX) {
		conn := limited(t, twoAnHour(t, db), grpclimit.Config{Key: httplimit.ByIP()})
		for range 2 {
			require.Equal(t, []string{right, right, right, right, "EOF"}, watchFor(t, conn, right, right, right, right))
		}
		require.Equal(t, []string{"ResourceExhausted"}, watchFor(t, conn, right))
	})
	onBoth(t, func(t *testing.T, db ratelimit.DBTX) {
		conn := limited(t, twoAnHour(t, db), grpclimit.Config{Key: httplimit.ByIP(), Charge: grpclimit.ChargeFailures})
		for range 3 {
			require.Equal(t, []string{right, "EOF"}, watchFor(t, conn, right))
		}
		for range 2 {
			require.Equal(t, []string{right, "Unauthenticated"}, watchFor(t, conn, right, "wrong"))
		}
		require.Equal(t, []string{"ResourceExhausted"}, watchFor(t, conn, right))
	})
}

// refusing is a database that refuses connections.
type refusing struct{}

func (refusing) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, &pgconn.PgError{Code: "57P03", SeverityUnlocalized: "FATAL"}
}

// While the database cannot decide, a call passes only if OnFailure allows it.
func TestWithoutADecision(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		onFailure ratelimit.FailureMode
		want      codes.Code
		retry     bool
	}{
		"return error": {ratelimit.ReturnError(), codes.Unavailable, false},
		"fail open":    {ratelimit.FailOpen(), codes.Unauthenticated, false}, // the code of the handler
		"fail closed":  {ratelimit.FailClosed(), codes.Unavailable, true},
		"fall back":    {ratelimit.FallbackLocal(1), codes.Unauthenticated, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var journal testkit.Journal
			limiter := limitertest.New(t, refusing{}, ratelimit.Config{
				Name: "login", Policy: ratelimit.FixedWindow{Limit: 2, Window: time.Hour}, OnFailure: test.onFailure,
			}, ratelimit.ClientConfig{Logger: journal.Logger()})
			conn := limited(t, limiter, grpclimit.Config{Key: httplimit.ByIP(), Charge: grpclimit.ChargeFailures})
			err := call(t.Context(), conn, "wrong")
			require.Equal(t, test.want, status.Code(err))
			require.Equal(t, test.retry, retryDelay(t, err) > 0)
			require.Equal(t, []string{test.want.String()}, watchFor(t, conn, "wrong"))
		})
	}
}

// A call for a key whose row a transaction has locked gets Unavailable, whatever OnFailure says.
func TestHeldKey(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "login", Policy: ratelimit.FixedWindow{Limit: 2, Window: time.Hour}, OnFailure: ratelimit.FailOpen(),
	}, ratelimit.ClientConfig{Timeout: 8 * time.Second})
	conn := limited(t, limiter, grpclimit.Config{
		Key: httplimit.ByHeader("user"), Logger: slog.New(slog.DiscardHandler),
	})
	ctx := metadata.AppendToOutgoingContext(t.Context(), "user", "123")

	tx := pgtest.Begin(t, db)
	_, err := limiter.WithTx(tx).Allow(t.Context(), "123")
	require.NoError(t, err)
	err = call(ctx, conn, right)
	require.Equal(t, codes.Unavailable, status.Code(err))
	require.Zero(t, retryDelay(t, err))
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, call(ctx, conn, right))
}

// Each answer of a limiter becomes the right gRPC code.
func TestCodes(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		result ratelimit.Result
		err    error
		want   codes.Code
		retry  time.Duration
	}{
		"allowed": {result: ratelimit.Result{Allowed: true}, want: codes.OK},
		"denied": {
			result: ratelimit.Result{RetryAfter: 1500*time.Millisecond + time.Microsecond},
			want:   codes.ResourceExhausted, retry: 1500*time.Millisecond + time.Microsecond,
		},
		"denied, nobody knows for how long": {want: codes.ResourceExhausted},
		"closed": {
			result: ratelimit.Result{Source: ratelimit.SourceFailedClosed, RetryAfter: time.Second},
			want:   codes.Unavailable, retry: time.Second,
		},
		"invalid key":   {err: &ratelimit.KeyError{Reason: "is odd"}, want: codes.InvalidArgument},
		"large cost":    {err: &ratelimit.CostError{Cost: 11, Limit: 10}, want: codes.InvalidArgument},
		"negative cost": {err: &ratelimit.CostError{Cost: -1, Limit: 10}, want: codes.InvalidArgument},
		"not migrated":  {err: ratelimit.ErrNotMigrated, want: codes.Unavailable},
		"held":          {err: ratelimit.ErrKeyHeld, want: codes.Unavailable},
		"any other":     {err: errors.New("of user:123"), want: codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var journal testkit.Journal
			limiter := &fakeLimiter{result: test.result, err: test.err}
			conn := limited(t, limiter, grpclimit.Config{Key: httplimit.ByIP(), Logger: journal.Logger()})
			err := call(t.Context(), conn, right)
			require.Equal(t, test.want, status.Code(err))
			require.Equal(t, test.retry, retryDelay(t, err))
			require.NotContains(t, status.Convert(err).Message(), "user:123")
			require.Equal(t, test.err != nil, journal.String() != "")
		})
	}
}

// A call whose context has ended before the decision gets the context's code. The handler does not run.
func TestEndedContext(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		ended func() (context.Context, context.CancelFunc)
		want  codes.Code
	}{
		{func() (context.Context, context.CancelFunc) { return context.WithCancel(t.Context()) }, codes.Canceled},
		{func() (context.Context, context.CancelFunc) {
			return context.WithDeadline(t.Context(), noon.AddDate(-1, 0, 0))
		}, codes.DeadlineExceeded},
	} {
		ctx, cancel := test.ended()
		cancel()
		limit, err := grpclimit.New(twoAnHour(t, ratelimittest.NewDB()), grpclimit.Config{Key: always()})
		require.NoError(t, err)
		response, err := limit.Unary(ctx, nil, &grpc.UnaryServerInfo{FullMethod: logIn},
			func(context.Context, any) (any, error) { return "reached", nil })
		require.Nil(t, response)
		require.Equal(t, test.want, status.Code(err))
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()

	secret := []byte("a secret of sixteen bytes or more")
	user := httplimit.ByHeader("X-User")
	failing := errors.New("of user:123")
	for name, test := range map[string]struct {
		key      httplimit.Key
		metadata []string
		want     string // "" if the call has no key
	}{
		"peer":              {key: httplimit.ByIP(), want: "127.0.0.1"},
		"peer that forges":  {key: httplimit.ByIP(), metadata: []string{"x-forwarded-for", "192.0.2.1"}, want: "127.0.0.1"},
		"metadata":          {key: user, metadata: []string{"x-user", "ann"}, want: "ann"},
		"no metadata":       {key: user},
		"metadata twice":    {key: user, metadata: []string{"x-user", "ann", "x-user", "bob"}},
		"binary metadata":   {key: httplimit.ByHeader("id-bin"), metadata: []string{"id-bin", "\xffid"}, want: "\xffid"},
		"error of a ByFunc": {key: grpclimit.ByFunc(func(context.Context, string) (string, error) { return "", failing })},
		"method": {
			key:  grpclimit.ByFunc(func(_ context.Context, method string) (string, error) { return method, nil }),
			want: logIn,
		},
		"context": {
			key: grpclimit.ByFunc(func(ctx context.Context, _ string) (string, error) {
				values := metadata.ValueFromIncomingContext(ctx, "x-user")
				return fmt.Sprint(values), nil
			}),
			metadata: []string{"x-user", "ann"}, want: "[ann]",
		},
		"joined": {key: httplimit.Join(httplimit.ByIP(), user), metadata: []string{"x-user", "ann"}, want: "127.0.0.1|ann"},
		"hashed": {key: httplimit.HMAC(secret, user), metadata: []string{"x-user", "ann"}, want: "CsKaE3DCTMskr-pemw6mjg"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var journal testkit.Journal
			limiter := allowing()
			conn := limited(t, limiter, grpclimit.Config{Key: test.key, Logger: journal.Logger()})
			for range 2 {
				err := call(metadata.AppendToOutgoingContext(t.Context(), test.metadata...), conn, right)
				if test.want == "" {
					require.Equal(t, codes.InvalidArgument, status.Code(err))
					require.NotContains(t, status.Convert(err).Message(), "user:123")
				} else {
					require.NoError(t, err)
				}
			}
			if test.want == "" {
				require.Empty(t, limiter.keys)
				require.Len(t, journal.Lines(), 1)
				require.NotContains(t, journal.String(), "user:123")
				return
			}
			require.Equal(t, []string{test.want, test.want}, limiter.keys)
		})
	}
}

// Behind a trusted proxy, the key is the client's address. If a proxy is not trusted, the log has one line about it.
func TestProxies(t *testing.T) {
	t.Parallel()

	ctx := metadata.AppendToOutgoingContext(t.Context(), "x-forwarded-for", "2001:db8::1:2:3:4")
	limiter := allowing()
	trusted := httplimit.TrustedProxies(netip.MustParsePrefix("127.0.0.0/8"))
	require.NoError(t, call(ctx, limited(t, limiter, grpclimit.Config{Key: httplimit.ByIP(trusted)}), right))
	require.Equal(t, []string{"2001:db8::/64"}, limiter.keys)

	var journal testkit.Journal
	conn := limited(t, allowing(), grpclimit.Config{Key: httplimit.ByIP(), Logger: journal.Logger()})
	for range 2 {
		require.NoError(t, call(ctx, conn, right))
	}
	lines := journal.Lines()
	require.Len(t, lines, 1)
	require.Contains(t, lines[0], "TrustedProxies")
	require.NotContains(t, lines[0], "2001:db8")
}

// The log has one line if a call is charged twice for the same key, either by the same interceptors, or by two
// interceptors with the same limiter.
func TestChainedTwice(t *testing.T) {
	t.Parallel()

	type interceptors = grpclimit.Interceptors
	var journal testkit.Journal
	interceptorsOf := func(limiter httplimit.Limiter) *interceptors {
		i, err := grpclimit.New(limiter, grpclimit.Config{Key: httplimit.ByIP(), Logger: journal.Logger()})
		require.NoError(t, err)
		return i
	}
	limiter := allowing()
	one, alike, other := interceptorsOf(limiter), interceptorsOf(limiter), interceptorsOf(allowing())
	for _, test := range []struct {
		first, second *interceptors
		tells         string
	}{
		{one, other, ""},
		{one, one, "passes this middleware twice, and is charged twice: mount it once"},
		{interceptorsOf(limiter), alike, "the same limiter and find the same key, and is charged twice: mount one of them"},
	} {
		// An interceptor between these two may change the context and the metadata.
		unary := func(ctx context.Context, r any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			ctx, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			return next(metadata.NewIncomingContext(ctx, metadata.Pairs("a", "b")), r)
		}
		conn := connect(t, grpc.NewServer(grpc.ChainUnaryInterceptor(test.first.Unary, unary, test.second.Unary),
			grpc.ChainStreamInterceptor(test.first.Stream, test.second.Stream)))
		require.Equal(t, []string{right, "EOF"}, watchFor(t, conn, right)) // a stream
		streamed := journal.Lines()
		for range 3 {
			require.NoError(t, call(t.Context(), conn, right))
		}
		lines := append(streamed, journal.Lines()...)
		if test.tells == "" {
			require.Empty(t, lines)
			continue
		}
		require.Len(t, streamed, 1)
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], test.tells)
		require.NotContains(t, lines[0], "127.0.0.1")

		conn = connect(t, grpc.NewServer(grpc.ChainUnaryInterceptor(
			interceptorsOf(limiter).Unary, unary, interceptorsOf(limiter).Unary)))
		require.NoError(t, call(t.Context(), conn, right))
		require.Len(t, journal.Lines(), 1)
	}
}

// A proxy on a Unix socket is trusted with TrustUnixSocket. Without TrustUnixSocket, the log says what to do.
func TestUnixSocket(t *testing.T) {
	t.Parallel()

	ctx := metadata.AppendToOutgoingContext(t.Context(), "x-forwarded-for", "1.1.1.1, 203.0.113.9")
	ask := func(limiter *fakeLimiter, config grpclimit.Config) codes.Code {
		t.Helper()
		path := filepath.Join(t.TempDir(), "socket")
		listener, err := net.Listen("unix", path)
		require.NoError(t, err)
		conn := connectOver(t, limitedServer(t, limiter, config), listener, "unix:"+path)
		first, second := status.Code(call(ctx, conn, right)), status.Code(call(ctx, conn, right))
		require.Equal(t, first, second)
		return first
	}
	var journal testkit.Journal
	limiter := allowing()
	require.Equal(t, codes.InvalidArgument, ask(limiter, grpclimit.Config{Key: httplimit.ByIP(), Logger: journal.Logger()}))
	require.Empty(t, limiter.keys)
	lines := journal.Lines()
	require.Len(t, lines, 1)
	require.Contains(t, lines[0], "pass httplimit.TrustUnixSocket() to ByIP")
	require.NotContains(t, lines[0], "203.0.113")

	trusting := grpclimit.Config{Key: httplimit.ByIP(httplimit.TrustUnixSocket()), Logger: journal.Logger()}
	require.Equal(t, codes.OK, ask(limiter, trusting))
	require.Equal(t, []string{"203.0.113.9", "203.0.113.9"}, limiter.keys)
	require.Empty(t, journal.Lines())

	// A call without a peer did not come over a Unix socket.
	limit, err := grpclimit.New(limiter, trusting)
	require.NoError(t, err)
	ctx = metadata.NewIncomingContext(t.Context(), metadata.Pairs("x-forwarded-for", "203.0.113.9"))
	handler := func(context.Context, any) (any, error) { return right, nil }
	_, err = limit.Unary(ctx, nil, &grpc.UnaryServerInfo{FullMethod: logIn}, handler)
	require.Equal(t, codes.InvalidArgument, status.Code(err))
}

// The limiter of a call's tier decides the call, and gets its refund.
func TestTier(t *testing.T) {
	t.Parallel()

	free, paid := allowing(), allowing()
	free.result = ratelimit.Result{Limit: 10, RetryAfter: time.Second}
	conn := limited(t, free, grpclimit.Config{
		Key:    grpclimit.ByFunc(func(context.Context, string) (string, error) { return "key", nil }),
		Charge: grpclimit.ChargeFailures,
		Tier: func(ctx context.Context, fullMethod string) httplimit.Limiter {
			if values, _ := metadata.FromIncomingContext(ctx); fullMethod == logIn && len(values["paid"]) > 0 {
				return paid
			}
			return nil
		},
	})
	require.Equal(t, codes.ResourceExhausted, status.Code(call(t.Context(), conn, right)))
	require.NoError(t, call(metadata.AppendToOutgoingContext(t.Context(), "paid", "yes"), conn, right))
	require.Equal(t, []string{"key"}, free.keys)
	require.Equal(t, []string{"key"}, paid.keys)
	require.Equal(t, 1, paid.refunded)
	require.Zero(t, free.refunded)
}

func TestCost(t *testing.T) {
	t.Parallel()

	limiter := allowing()
	conn := limited(t, limiter, grpclimit.Config{
		Key: always(),
		Cost: func(_ context.Context, method string) int64 {
			if method == watch {
				return 0
			}
			return 3
		},
	})
	require.Equal(t, []codes.Code{codes.OK, codes.Unauthenticated}, codesOf(t, conn, right, "wrong"))
	require.Equal(t, []string{right, "EOF"}, watchFor(t, conn, right))
	require.Equal(t, []int64{3, 3}, limiter.costs)
}

// always returns a Key that finds the same key for all calls.
func always() httplimit.Key {
	return grpclimit.ByFunc(func(context.Context, string) (string, error) { return "key", nil })
}

// The code that the client gets decides whether the cost is given back. In doubt the cost is not given back.
func TestCharge(t *testing.T) {
	t.Parallel()

	allBut := func(free codes.Code) func(codes.Code) bool {
		return func(code codes.Code) bool { return code != free }
	}
	wrapped := fmt.Errorf("more: %w", status.Error(codes.NotFound, ""))
	for name, test := range map[string]struct {
		charge  func(codes.Code) bool
		err     error // the handler's error
		left    bool  // the client leaves before the handler returns
		refunds int
	}{
		"success":             {charge: grpclimit.ChargeFailures, refunds: 1},
		"error":               {charge: grpclimit.ChargeFailures, err: errors.New("oh")},
		"plain error is free": {charge: allBut(codes.Unknown), err: errors.New("oh"), refunds: 1},
		"code is free":        {charge: allBut(codes.NotFound), err: status.Error(codes.NotFound, ""), refunds: 1},
		"wrapped code":        {charge: allBut(codes.NotFound), err: wrapped, refunds: 1},
		"code of a context":   {charge: allBut(codes.Canceled), err: context.Canceled, refunds: 1},
		"code of one's own":   {charge: allBut(4711), err: status.Error(4711, ""), refunds: 1},
		"other code":          {charge: allBut(4711), err: status.Error(4712, "")},
		"the client has left": {charge: grpclimit.ChargeFailures, left: true},
		"nothing is free":     {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limiter := allowing()
			limit, err := grpclimit.New(limiter, grpclimit.Config{Key: always(), Charge: test.charge})
			require.NoError(t, err)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			response, err := limit.Unary(ctx, nil, &grpc.UnaryServerInfo{}, func(context.Context, any) (any, error) {
				if test.left {
					leave()
				}
				return "response", test.err
			})
			require.Equal(t, "response", response)
			require.Equal(t, test.err, err) // unchanged
			require.Equal(t, test.refunds, limiter.refunded)
		})
	}

	limiter := allowing()
	limit, err := grpclimit.New(limiter, grpclimit.Config{Key: always(), Charge: grpclimit.ChargeFailures})
	require.NoError(t, err)
	require.PanicsWithValue(t, "oh", func() {
		_, _ = limit.Unary(t.Context(), nil, &grpc.UnaryServerInfo{},
			func(context.Context, any) (any, error) { panic("oh") })
	})
	require.Zero(t, limiter.refunded)
}

func TestConfigurationsThatCannotWork(t *testing.T) {
	t.Parallel()

	noChoice := limitertest.New(t, ratelimittest.NewDB(), ratelimit.Config{
		Name: "login", Policy: ratelimit.FixedWindow{Limit: 2, Window: time.Hour},
	})
	for _, test := range []struct {
		limiter httplimit.Limiter
		key     httplimit.Key
		says    string
	}{
		{nil, always(), "grpclimit: the limiter is nil"},
		{(*ratelimit.Limiter)(nil), always(), "grpclimit: the limiter is nil"},
		{noChoice, always(), "Config.OnFailure is required for grpclimit"},
		{allowing(), httplimit.Key{}, "ratelimit: grpclimit.Config.Key is none"},
		{allowing(), grpclimit.ByFunc(nil), "ratelimit: grpclimit.Config.Key is ByFunc of no function"},
	} {
		limit, err := grpclimit.New(test.limiter, grpclimit.Config{Key: test.key})
		require.ErrorContains(t, err, test.says)
		require.Nil(t, limit)
	}

	_, err := grpclimit.New(allowing(), grpclimit.Config{Key: always(), FullCode: codes.Internal})
	require.ErrorContains(t, err, "grpclimit.Config.FullCode must be ResourceExhausted or Unavailable, and is Internal")
	_, err = grpclimit.New(allowing(), grpclimit.Config{Key: always(), SlotTTL: -1})
	require.ErrorContains(t, err, "grpclimit.Config.SlotTTL must be")

	// New accepts a limiter with any name.
	_, err = grpclimit.New(&fakeLimiter{name: "Anmeldung für \"alle\""}, grpclimit.Config{Key: always()})
	require.NoError(t, err)
}

// A call holds its cost while its handler runs, and the handler says what was used.
func TestHoldFor(t *testing.T) {
	t.Parallel()

	limiter, err := ratelimit.New(pgtest.New(t).Pool, ratelimit.Config{
		Name: "tokens", Policy: ratelimit.FixedWindow{Limit: 100, Window: time.Hour}, OnFailure: ratelimit.FailOpen(),
	})
	require.NoError(t, err)
	limit, err := grpclimit.New(limiter, grpclimit.Config{
		Key:     grpclimit.ByFunc(func(context.Context, string) (string, error) { return "tenant:7", nil }),
		Cost:    func(context.Context, string) int64 { return 40 },
		Charge:  grpclimit.ChargeFailures,
		HoldFor: time.Minute,
	})
	require.NoError(t, err)
	left := int64(100)
	work := func(ctx context.Context, used int64) error {
		during, err := limiter.Peek(ctx, "tenant:7")
		require.NoError(t, err)
		require.Equal(t, left-40, during.Remaining)
		require.EqualValues(t, 40, during.Held)
		require.NoError(t, httplimit.Extend(ctx, 2*time.Minute))
		if used > 0 {
			left -= used
			_, err = httplimit.Settle(ctx, used)
		}
		return err
	}
	ends := func(used int64) {
		t.Helper()
		left -= used
		after, err := limiter.Peek(t.Context(), "tenant:7")
		require.NoError(t, err)
		require.Equal(t, left, after.Remaining)
		require.Zero(t, after.Held)
	}

	_, err = limit.Unary(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: logIn}, func(ctx context.Context, _ any) (any, error) {
		return nil, work(ctx, 7)
	})
	require.NoError(t, err)
	ends(0)
	info := &grpc.StreamServerInfo{FullMethod: watch}
	require.NoError(t, limit.Stream(nil, &stream{ctx: t.Context()}, info, func(_ any, s grpc.ServerStream) error {
		return work(s.Context(), 9)
	}))
	ends(0)
	require.NoError(t, limit.Stream(nil, &stream{ctx: t.Context()}, info, func(_ any, s grpc.ServerStream) error {
		return work(s.Context(), 0) // not settled, and Charge does not charge a success
	}))
	ends(0)
	err = limit.Stream(nil, &stream{ctx: t.Context()}, info, func(_ any, s grpc.ServerStream) error {
		require.NoError(t, work(s.Context(), 0))
		return status.Error(codes.Internal, "no answer")
	})
	require.Equal(t, codes.Internal, status.Code(err))
	ends(40)
}

// A call and a stream have a slot until their handlers return, also after a panic.
func TestSlots(t *testing.T) {
	t.Parallel()

	limiter, err := ratelimit.New(pgtest.New(t).Pool, ratelimit.Config{
		Name: "exports", Policy: ratelimit.Concurrency{Limit: 1}, OnFailure: ratelimit.ReturnError(),
	})
	require.NoError(t, err)
	for full, want := range map[codes.Code]codes.Code{
		codes.OK: codes.ResourceExhausted, codes.ResourceExhausted: codes.ResourceExhausted,
		codes.Unavailable: codes.Unavailable,
	} {
		limit, err := grpclimit.New(limiter, grpclimit.Config{
			Key:     grpclimit.ByFunc(func(context.Context, string) (string, error) { return "tenant:7", nil }),
			SlotTTL: 20 * time.Second, FullCode: full,
		})
		require.NoError(t, err)
		unary := func(work func(context.Context)) error {
			_, err := limit.Unary(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: logIn},
				func(ctx context.Context, _ any) (any, error) {
					work(ctx)
					return nil, nil
				})
			return err
		}
		streams := func(work func(context.Context)) error {
			return limit.Stream(nil, &stream{ctx: t.Context()}, &grpc.StreamServerInfo{FullMethod: watch},
				func(_ any, s grpc.ServerStream) error {
					work(s.Context())
					return nil
				})
		}
		for _, call := range []func(func(context.Context)) error{unary, streams} {
			require.NoError(t, call(func(ctx context.Context) {
				require.Positive(t, httplimit.SlotOf(ctx).Fence())
				for _, other := range []func(func(context.Context)) error{unary, streams} {
					err := other(func(context.Context) { t.Error("two at a time") })
					require.Equal(t, want, status.Code(err))
					delay := retryDelay(t, err)
					require.LessOrEqual(t, delay, 20*time.Second)
				}
				require.NoError(t, httplimit.SlotOf(ctx).Release(ctx))
			}))
			require.PanicsWithValue(t, "fault", func() { _ = call(func(context.Context) { panic("fault") }) })
			testkit.WaitUntil(t, func() bool { // a slow release goes on
				looked, err := limiter.Peek(t.Context(), "tenant:7")
				return err == nil && looked.Held == 0
			})
		}
	}
}

// stream is a stream that only has a context.
type stream struct {
	grpc.ServerStream

	ctx context.Context //nolint:containedctx // as in gRPC's streams
}

func (s *stream) Context() context.Context { return s.ctx }
