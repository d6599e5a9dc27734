package envoy_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
	"github.com/pgratelimit/ratelimit/service/internal/envoy"
)

// noon is a time at which a window of a day is half over.
func noon() *clock { return &clock{now: time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)} }

const shop = `
domain: shop
descriptors:
- {key: login, rate_limit: {unit: hour, requests_per_unit: 5}}
- {key: seen, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 2}}
- {key: soft, value: a, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
- {key: soft, value: b, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 2}}
- {key: endless, rate_limit: {unlimited: true}}
- {key: day, rate_limit: {unit: day, requests_per_unit: 3}}
`

// q returns a request for these descriptors. Each has the form key=value, and entries are joined by a comma.
func q(domain string, descriptors ...string) modelRequest {
	request := modelRequest{Domain: domain}
	for _, text := range descriptors {
		var d modelDescriptor
		for e := range strings.SplitSeq(text, ",") {
			key, value, _ := strings.Cut(e, "=")
			d.Entries = append(d.Entries, [2]string{key, value})
		}
		request.Descriptors = append(request.Descriptors, d)
	}
	return request
}

// connect serves over gRPC, and returns a connection.
func connect(t *testing.T, server *envoy.Server) *grpc.ClientConn {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	g := grpc.NewServer(grpc.MaxRecvMsgSize(envoy.MaxMessage))
	server.Register(g)
	served := make(chan error, 1)
	go func() { served <- g.Serve(listener) }()
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, conn.Close())
		g.Stop()
		require.NoError(t, <-served)
	})
	return conn
}

// Many callers on several connections get exactly the limit, on two servers.
func TestServersAdmitExactlyTheLimit(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	config := rules(t, `
domain: shop
descriptors:
- {key: one, rate_limit: {unit: year, requests_per_unit: 100}}
- {key: other, rate_limit: {unit: year, requests_per_unit: 70}}
`)
	var allowed, pairs atomic.Int64
	var calls sync.WaitGroup
	for range 2 {
		client := pb.NewRateLimitServiceClient(connect(t, newServer(t, db.NewPool(t, nil), noon(), config, envoy.Options{})))
		for range 16 {
			calls.Go(func() {
				for i := range 10 {
					request := q("shop", "one=a")
					if i%2 == 0 {
						request = q("shop", "one=a", "other=a")
					}
					response, err := client.ShouldRateLimit(t.Context(), message(t, request))
					if err != nil {
						t.Error(err)
						return
					}
					if response.GetOverallCode() == pb.RateLimitResponse_OK {
						allowed.Add(1)
						if i%2 == 0 {
							pairs.Add(1)
						}
					}
				}
			})
		}
	}
	calls.Wait()
	require.EqualValues(t, 100, allowed.Load())
	require.LessOrEqual(t, pairs.Load(), int64(70))
	server := newServer(t, db.NewPool(t, nil), noon(), config, envoy.Options{})
	look := q("shop", "one=a", "other=a")
	look.Descriptors[0].Hits, look.Descriptors[1].Hits = new(uint64), new(uint64)
	answer := ask(t.Context(), t, server, look)
	require.Zero(t, answer.Statuses[0].Remaining)
	require.EqualValues(t, 70-pairs.Load(), answer.Statuses[1].Remaining, "a denied pair has taken nothing")
}

func TestHealthSaysWhetherTheServerServes(t *testing.T) {
	t.Parallel()
	server := newServer(t, ratelimittest.NewDB(), noon(), rules(t, shop), envoy.Options{})
	g := grpc.NewServer()
	alive := server.Register(g)
	for _, name := range []string{"", "ratelimit", "envoy.service.ratelimit.v3.RateLimitService"} {
		answer, err := alive.Check(t.Context(), &healthpb.HealthCheckRequest{Service: name})
		require.NoError(t, err, name)
		require.Equal(t, healthpb.HealthCheckResponse_SERVING, answer.GetStatus(), name)
	}
	alive.Shutdown()
	answer, err := alive.Check(t.Context(), &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	require.Equal(t, healthpb.HealthCheckResponse_NOT_SERVING, answer.GetStatus())
}

func TestRequestsThatAreWrong(t *testing.T) {
	t.Parallel()
	conn := connect(t, newServer(t, ratelimittest.NewDB(), noon(), rules(t, shop), envoy.Options{}))
	client := pb.NewRateLimitServiceClient(conn)
	many := strings.Split(strings.Repeat("login ", envoy.MaxDescriptors+1), " ")[:envoy.MaxDescriptors+1]
	noUnit := q("shop", "login")
	noUnit.Descriptors[0].Limit = []string{"5", "fortnight"}
	for _, test := range []struct {
		name    string
		request modelRequest
		code    codes.Code
		message string
	}{
		{"no domain", q("", "login"), codes.Unknown, "rate limit domain must not be empty"},
		{"no descriptors", q("shop"), codes.Unknown, "rate limit descriptor list must not be empty"},
		{"many descriptors", q("shop", many...), codes.InvalidArgument, "the request has 101 descriptors; it may have 100"},
		{"many entries", q("shop", strings.Repeat("a=b,", envoy.MaxEntries)+"a=b"), codes.InvalidArgument, "descriptor 0 has 65 entries; it may have 64"},
		{"no unit", noUnit, codes.InvalidArgument, "the limit of descriptor 0 has no unit"},
		{"a large message", q("shop", "login="+strings.Repeat("x", 1<<20)), codes.ResourceExhausted, "received message larger than max"},
	} {
		_, err := client.ShouldRateLimit(t.Context(), message(t, test.request))
		require.Equal(t, test.code, status.Code(err), "%s: %v", test.name, err)
		require.Contains(t, status.Convert(err).Message(), test.message, test.name)
		require.NotContains(t, err.Error(), "xxx", "keys are in no error")
	}
	answer, err := client.ShouldRateLimit(t.Context(), message(t, q("shop", many[:envoy.MaxDescriptors]...)))
	require.NoError(t, err)
	require.Equal(t, pb.RateLimitResponse_OVER_LIMIT, answer.GetOverallCode())
}

func TestHitsOfAnySizeAreAnswered(t *testing.T) {
	t.Parallel()
	server := newServer(t, ratelimittest.NewDB(), noon(), rules(t, shop), envoy.Options{})
	request := q("shop", "login")
	request.Hits = math.MaxUint32
	require.Equal(t, "OVER_LIMIT", ask(t.Context(), t, server, request).Overall)
	for _, hits := range []uint64{math.MaxUint32, math.MaxInt64, math.MaxUint64} {
		for range 2 {
			request.Descriptors[0].Hits = &hits
			request.Descriptors[0].Negative = false
			require.Equal(t, "OVER_LIMIT", ask(t.Context(), t, server, request).Overall)
		}
		request.Descriptors[0].Negative = true
		require.EqualValues(t, 5, ask(t.Context(), t, server, request).Statuses[0].Remaining)
	}
}

// The key is in the database as pgratelimit shows it. Long keys are hashed, and all of them count by themselves.
func TestKeys(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	server := newServer(t, db.NewPool(t, nil), noon(), rules(t, `
domain: shop
descriptors:
- key: a
  rate_limit: {unit: hour, requests_per_unit: 1}
  descriptors:
  - {key: b, rate_limit: {unit: hour, requests_per_unit: 1}}
`), envoy.Options{})
	long := strings.Repeat("x", 505)
	requests := []modelRequest{
		q("shop", "a"), q("shop", "a=1"), q("shop", "a=1,b=2"), q("shop", "a=%"), q("shop", "a=\x00\n"),
		q("shop", "a="+long), q("shop", "a="+long+"y"), q("shop", "a="+long+"z"),
	}
	requests = append(requests, modelRequest{Domain: "shop", Descriptors: []modelDescriptor{{Entries: [][2]string{{"a", "1,b=2"}}}}})
	for i, request := range requests {
		require.Equal(t, "OK", ask(t.Context(), t, server, request).Overall, i)
		require.Equal(t, "OVER_LIMIT", ask(t.Context(), t, server, request).Overall, i)
	}
	rows, err := db.Pool.Query(t.Context(), "SELECT prefix, key FROM rate_limit_ephemeral")
	require.NoError(t, err)
	var got []string
	var name, key string
	_, err = pgx.ForEachRow(rows, []any{&name, &key}, func() error {
		require.Equal(t, "envoy:shop", name)
		got = append(got, key)
		return nil
	})
	require.NoError(t, err)
	require.Len(t, got, len(requests))
	require.Subset(t, got, []string{
		"a= hour", "a=1 hour", "a=1,b=2 hour", "a=1%2Cb%3D2 hour", "a=%25 hour", "a=%00%0A hour", "a=" + long + " hour",
	})
	hashed := 0
	for _, key := range got {
		if strings.HasPrefix(key, "sha256:") && strings.HasSuffix(key, " hour") {
			require.Len(t, key, 7+64+5)
			hashed++
		}
	}
	require.Equal(t, 2, hashed)
}

// The reference joins a key and its value with _ before it compares them, so these rules match more than they say.
func TestKeysWithAnUnderscoreMatchAsInTheReference(t *testing.T) {
	t.Parallel()
	server := newServer(t, ratelimittest.NewDB(), noon(), rules(t, `
domain: shop
descriptors:
- {key: a_b, rate_limit: {unit: hour, requests_per_unit: 1}}
- {key: c, value: d, rate_limit: {unit: hour, requests_per_unit: 2}}
- {key: e*, rate_limit: {unit: hour, requests_per_unit: 3}}
`), envoy.Options{})
	for descriptor, want := range map[string]string{
		"a=b": "1 per HOUR", "a_b=z": "1 per HOUR", "c=d": "2 per HOUR", "c_d=z": "2 per HOUR", "c=e": "",
		"east=1": "3 per HOUR", "west=1": "",
	} {
		require.Equal(t, want, ask(t.Context(), t, server, q("shop", descriptor)).Statuses[0].Limit, descriptor)
	}
}

func TestHeadersTellOfTheTightestLimit(t *testing.T) {
	t.Parallel()
	server := newServer(t, ratelimittest.NewDB(), noon(), rules(t, shop), envoy.Options{Headers: envoy.DefaultHeaders()})
	headers := func(descriptors ...string) (text []string) {
		response, err := server.ShouldRateLimit(t.Context(), message(t, q("shop", descriptors...)))
		require.NoError(t, err)
		for _, h := range response.GetResponseHeadersToAdd() {
			text = append(text, h.GetKey()+": "+h.GetValue())
		}
		return text
	}
	require.Empty(t, headers("unknown"))
	require.Empty(t, headers("endless"))
	require.Equal(t, []string{"RateLimit-Limit: 5", "RateLimit-Remaining: 4", "RateLimit-Reset: 3600"}, headers("login"))
	require.Equal(t, []string{"RateLimit-Limit: 3", "RateLimit-Remaining: 2", "RateLimit-Reset: 43200"}, headers("login", "day"))
	require.Equal(t, []string{"RateLimit-Limit: 3", "RateLimit-Remaining: 1", "RateLimit-Reset: 43200"}, headers("day"))
	require.Equal(t, []string{"RateLimit-Limit: 3", "RateLimit-Remaining: 0", "RateLimit-Reset: 43200"}, headers("day"))
	require.Equal(t, []string{"RateLimit-Limit: 3", "RateLimit-Remaining: 0", "RateLimit-Reset: 43200"}, headers("soft=a", "day"))
}

func TestDynamicMetadata(t *testing.T) {
	t.Parallel()
	server := newServer(t, ratelimittest.NewDB(), noon(), rules(t, `
domain: shop
descriptors:
- key: a
  rate_limit: {unit: hour, requests_per_unit: 1}
  metadata: {team: red, list: [1, true, text], both: {x: 1}}
- key: b
  rate_limit: {unit: hour, requests_per_unit: 5}
  metadata: {team: blue, both: {x: 2, y: 3}}
`), envoy.Options{DynamicMetadata: true})
	for _, want := range []string{
		`{"descriptors":[{"entries":["a=1"]},{"entries":["b=2"],"hitsAddend":1}],"domain":"shop","hitsAddend":1,` +
			`"metadata":{"both":{"x":1,"y":3},"list":[1,true,"text"],"team":"red"}}`,
		`{"descriptors":[{"entries":["a=1"]},{"entries":["b=2"],"hitsAddend":1}],"domain":"shop","hitsAddend":1,` +
			`"metadata":{"both":{"x":2,"y":3},"team":"blue"}}`,
	} {
		request, one := q("shop", "a=1", "b=2"), uint64(1)
		request.Hits, request.Descriptors[1].Hits = 1, &one
		response, err := server.ShouldRateLimit(t.Context(), message(t, request))
		require.NoError(t, err)
		text, err := protojson.Marshal(response.GetDynamicMetadata())
		require.NoError(t, err)
		require.JSONEq(t, want, string(text))
	}
}

func TestShadowModeOfTheServerAnswersOK(t *testing.T) {
	t.Parallel()
	server := newServer(t, ratelimittest.NewDB(), noon(), rules(t, shop), envoy.Options{ShadowMode: true})
	for range 5 {
		ask(t.Context(), t, server, q("shop", "login"))
	}
	answer := ask(t.Context(), t, server, q("shop", "login"))
	require.Equal(t, "OK", answer.Overall)
	require.Equal(t, "OVER_LIMIT", answer.Statuses[0].Code)
	require.EqualValues(t, 1, server.Stats().GlobalShadowMode)
}

func TestUseReplacesTheRulesAndKeepsTheCounts(t *testing.T) {
	t.Parallel()
	server := newServer(t, ratelimittest.NewDB(), noon(), rules(t, shop), envoy.Options{})
	for range 5 {
		require.Equal(t, "OK", ask(t.Context(), t, server, q("shop", "login")).Overall)
	}
	require.Equal(t, "OVER_LIMIT", ask(t.Context(), t, server, q("shop", "login")).Overall)
	server.Use(rules(t, strings.Replace(shop, "requests_per_unit: 5", "requests_per_unit: 7", 1)))
	require.Equal(t, modelStatus{"OK", "7 per HOUR", 1, 3600}, ask(t.Context(), t, server, q("shop", "login")).Statuses[0])
	require.EqualValues(t, 2, server.Stats().ConfigLoads)
	server.LoadFailed()
	require.EqualValues(t, 1, server.Stats().ConfigLoadErrors)
}

func TestOnFailure(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		onFailure envoy.OnFailure
		want      modelAnswer
	}{
		{envoy.Fail, modelAnswer{Error: "Unavailable: the database does not decide: unavailable"}},
		{envoy.Allow, modelAnswer{Overall: "OK", Statuses: []modelStatus{{"OK", "5 per HOUR", 0, 3600}, {Code: "OK"}}}},
		{envoy.Deny, modelAnswer{Overall: "OVER_LIMIT", Statuses: []modelStatus{{"OVER_LIMIT", "5 per HOUR", 0, 3600}, {Code: "OK"}}}},
	} {
		server := newServer(t, away{}, noon(), rules(t, shop), envoy.Options{OnFailure: test.onFailure})
		require.Equal(t, test.want, ask(t.Context(), t, server, q("shop", "login=secret", "unknown")))
		require.EqualValues(t, 1, server.Stats().RedisErrors)
		require.Equal(t, "OK", ask(t.Context(), t, server, q("shop", "unknown", "endless")).Overall, "no limit asks")
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		require.Contains(t, ask(ended, t, server, q("shop", "login")).Error, "Canceled")
	}
}

// away is a database that is away.
type away struct{}

func (away) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")}
}

func TestStatsHaveTheNamesOfTheReference(t *testing.T) {
	t.Parallel()
	server := newServer(t, ratelimittest.NewDB(), noon(), rules(t, shop+`
- {key: host, value: "10.0.0.*", rate_limit: {unit: hour, requests_per_unit: 10}}
- {key: user, value_to_metric: true, descriptors: [{key: path, value: /a*, rate_limit: {unit: hour, requests_per_unit: 10}}]}
- {key: full, detailed_metric: true, rate_limit: {unit: hour, requests_per_unit: 10}}
- {key: pool, value: p*, share_threshold: true, detailed_metric: true, rate_limit: {unit: hour, requests_per_unit: 10}}
`), envoy.Options{})
	tell := func(hits uint32, descriptors ...string) {
		request := q("shop", descriptors...)
		request.Hits = hits
		ask(t.Context(), t, server, request)
	}
	tell(3, "login=a")
	tell(2, "login=a") // one of these is near the limit
	tell(2, "login=a") // over
	tell(1, "login=a")
	tell(2, "seen=a")
	tell(1, "seen=a") // over, but in shadow mode
	tell(1, "host=10.0.0.7")
	tell(1, "user=u1,path=/abc")
	tell(1, "full=u|1")
	tell(1, "pool=p1")
	tell(1, "endless")
	tell(1, "nothing")
	request := q("nowhere", "a")
	ask(t.Context(), t, server, request)
	request = q("shop", "own=limit")
	request.Descriptors[0].Limit = []string{"5", "hour"}
	ask(t.Context(), t, server, request)
	ask(t.Context(), t, server, q("", "a"))

	got := map[string]uint64{}
	server.Stats().Each(func(name string, value uint64) {
		if value > 0 {
			got[strings.TrimPrefix(name, "ratelimit.service.")] = value
		}
	})
	require.Equal(t, map[string]uint64{
		"rate_limit.shop.login.total_hits": 8, "rate_limit.shop.login.within_limit": 5,
		"rate_limit.shop.login.near_limit": 1, "rate_limit.shop.login.over_limit": 3,
		"rate_limit.shop.login.over_limit_with_local_cache": 1,
		"rate_limit.shop.seen.total_hits":                   3, "rate_limit.shop.seen.within_limit": 2, "rate_limit.shop.seen.near_limit": 1,
		"rate_limit.shop.seen.over_limit": 1, "rate_limit.shop.seen.shadow_mode": 1,
		"rate_limit.shop.host_10.0.0.*.total_hits": 1, "rate_limit.shop.host_10.0.0.*.within_limit": 1,
		"rate_limit.shop.user_u1.path_/a*.total_hits": 1, "rate_limit.shop.user_u1.path_/a*.within_limit": 1,
		"rate_limit.shop.full_u_1.total_hits": 1, "rate_limit.shop.full_u_1.within_limit": 1,
		"rate_limit.shop.pool_p*.total_hits": 1, "rate_limit.shop.pool_p*.within_limit": 1,
		"rate_limit.shop.own_limit.total_hits": 1, "rate_limit.shop.own_limit.within_limit": 1,
		"rate_limit.nowhere.domain_not_found":  1,
		"call.should_rate_limit.service_error": 1, "config_load_success": 1,
	}, got)
}

// Callers can make names, but not more than there is room for.
func TestStatsHaveABound(t *testing.T) {
	t.Parallel()
	server := newServer(t, ratelimittest.NewDB(), noon(), rules(t, shop), envoy.Options{})
	for i := range 300 {
		ask(t.Context(), t, server, q(fmt.Sprint("domain", i), "a"))
	}
	domains := server.Stats().UnknownDomains
	require.Len(t, domains, 101)
	require.Equal(t, envoy.DomainStats{Name: "overflow", NotFound: 200}, domains[100])
}

// Each domain without rules is logged once. The log does not grow beyond a bound, whatever callers send.
func TestUnknownDomainsAreLogged(t *testing.T) {
	t.Parallel()
	var log testkit.Journal
	server := newServer(t, ratelimittest.NewDB(), noon(), rules(t, shop), envoy.Options{Logger: log.Logger()})
	for range 3 {
		require.Equal(t, "OK", ask(t.Context(), t, server, q("shpo", "login")).Overall)
		require.Equal(t, "OK", ask(t.Context(), t, server, q("shop", "login")).Overall)
	}
	ask(t.Context(), t, server, q("a\nb"+strings.Repeat("x", 200), "login"))
	require.Len(t, log.Lines(), 2)
	require.Contains(t, log.String(), "domain=shpo\n")
	require.Contains(t, log.String(), `domain="a\nb`+strings.Repeat("x", 97)+"\"\n")
	for i := range 300 {
		ask(t.Context(), t, server, q(fmt.Sprint("domain", i), "login"))
	}
	lines := log.Lines()
	require.Len(t, lines, 99)
	require.Contains(t, lines[97], "domain97")
	require.Contains(t, lines[98], "more domains")
}

func TestLimitsInRequestsMakeNoMoreLimitersThanThereIsRoomFor(t *testing.T) {
	t.Parallel()
	server := newServer(t, ratelimittest.NewDB(), noon(), rules(t, shop), envoy.Options{})
	for i := range 10_000 {
		request := q("shop", "login")
		request.Descriptors[0].Limit = []string{fmt.Sprint(i + 100_000), "hour"}
		require.Equal(t, "OK", ask(t.Context(), t, server, request).Overall)
	}
	require.LessOrEqual(t, envoy.LimitersOf(server), 4096)
}

func TestJSON(t *testing.T) {
	t.Parallel()
	handler := newServer(t, ratelimittest.NewDB(), noon(), rules(t, shop), envoy.Options{}).JSON()
	broken := newServer(t, away{}, noon(), rules(t, shop), envoy.Options{}).JSON()
	const login = `{"domain": "shop", "descriptors": [{"entries": [{"key": "login"}]}], "hitsAddend": 4}`
	for _, test := range []struct {
		handler http.Handler
		body    string
		code    int
		want    string
	}{
		{handler, login, 200, `{"overallCode":"OK","statuses":[{"code":"OK","currentLimit":{"requestsPerUnit":5,"unit":"HOUR"},"limitRemaining":1,"durationUntilReset":"3600s"}]}`},
		{handler, login, 429, `{"overallCode":"OVER_LIMIT","statuses":[{"code":"OVER_LIMIT","currentLimit":{"requestsPerUnit":5,"unit":"HOUR"},"durationUntilReset":"3600s"}]}`},
		{handler, "", 400, ""},
		{handler, "{", 400, ""},
		{handler, "{}", 400, ""},
		{handler, `{"domain": "shop"}`, 400, ""},
		{handler, `{"domain": "shop", "limits": []}`, 400, ""},
		{handler, `{"domain": "` + strings.Repeat("x", envoy.MaxMessage) + `"}`, 400, ""},
		{broken, login, 500, ""},
	} {
		recorder := httptest.NewRecorder()
		test.handler.ServeHTTP(recorder, httptest.NewRequest(http.MethodPost, "/json", strings.NewReader(test.body)))
		require.Equal(t, test.code, recorder.Code, test.body[:min(100, len(test.body))])
		if test.want != "" {
			require.Equal(t, "application/json", recorder.Header().Get("Content-Type"))
			require.JSONEq(t, test.want, recorder.Body.String())
		} else {
			require.Equal(t, "application/problem+json", recorder.Header().Get("Content-Type"))
			require.Contains(t, recorder.Body.String(), fmt.Sprintf(`{"status":%d,"title":"`, test.code))
			require.NotContains(t, recorder.Body.String(), "xxx")
		}
	}
}

// A request of any form gets an answer with a status for each descriptor, or an error that the caller can understand.
func FuzzRequests(f *testing.F) {
	config := load(f, filesIn(f, "configs"))
	for _, r := range recordings(f)[:200] {
		text, err := proto.Marshal(message(f, r.modelRequest))
		require.NoError(f, err)
		f.Add(text)
	}
	client, err := ratelimit.NewClient(ratelimittest.NewDB(), ratelimit.ClientConfig{})
	require.NoError(f, err)
	server := envoy.New(envoy.Options{
		Client: client, Headers: envoy.DefaultHeaders(), DynamicMetadata: true,
	}, config)
	f.Fuzz(func(t *testing.T, content []byte) {
		var request pb.RateLimitRequest
		if proto.Unmarshal(content, &request) != nil {
			return
		}
		response, err := server.ShouldRateLimit(t.Context(), &request)
		if err != nil {
			require.Contains(t, []codes.Code{codes.Unknown, codes.InvalidArgument}, status.Code(err), "%v", err)
			return
		}
		require.Len(t, response.GetStatuses(), len(request.GetDescriptors()))
		require.NotEqual(t, pb.RateLimitResponse_UNKNOWN, response.GetOverallCode())
		_, err = proto.Marshal(response)
		require.NoError(t, err)
	})
}
