// Package envoy answers Envoy's rate limit protocol, envoy.service.ratelimit.v3, as its reference service does
// (github.com/envoyproxy/ratelimit), but counts in Postgres. It reads the configuration files of the reference.
//
// It differs in one rule: a request takes from all of its limits or from none, and a denied request takes nothing.
package envoy

import (
	"context"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// The largest request that a Server answers.
const (
	MaxMessage     = 256 << 10 // bytes
	MaxDescriptors = 100       // the most that one statement of the library decides
	MaxEntries     = 64        // of a descriptor
)

// OnFailure says what a Server answers while Postgres is unreachable or too slow.
type OnFailure uint8

// These are all the answers.
const (
	Fail  OnFailure = iota // the error Unavailable, so that Envoy's failure_mode_deny decides
	Allow                  // OK
	Deny                   // OVER_LIMIT
)

// Options say how a Server answers. Client is required.
type Options struct {
	Client    *ratelimit.Client
	Durable   bool // see ratelimit.Config
	OnFailure OnFailure
	// Headers are added to the answers, unless the names are empty.
	Headers Headers
	// DynamicMetadata adds the request and the metadata of the rules to the answers.
	DynamicMetadata bool
	// ShadowMode answers OK to all requests. What a request would have been answered is only counted.
	ShadowMode bool
	// Logger gets a line for each domain without rules that is asked for, up to a bound. Defaults to slog.Default().
	Logger *slog.Logger
	// Now is the clock for answers that need no database. Defaults to time.Now.
	Now func() time.Time
}

// Headers are names of headers for the limit, for what remains of it, and for the seconds until the next window. The
// headers tell of the limit with the least left.
type Headers struct{ Limit, Remaining, Reset string }

// DefaultHeaders returns the names that the reference uses by default.
func DefaultHeaders() Headers {
	return Headers{Limit: "RateLimit-Limit", Remaining: "RateLimit-Remaining", Reset: "RateLimit-Reset"}
}

// Server is Envoy's RateLimitService. It is safe for concurrent use.
type Server struct {
	pb.UnimplementedRateLimitServiceServer

	options  Options
	config   atomic.Pointer[Config]
	limiters limiters
	counters counters
}

// New returns a server with these rules.
func New(options Options, config *Config) *Server {
	if options.Now == nil {
		options.Now = time.Now
	}
	if options.Logger == nil {
		options.Logger = slog.Default()
	}
	s := &Server{
		options: options,
		limiters: limiters{
			client: options.Client, durable: options.Durable,
			domains: map[string]*ratelimit.Limiter{}, kept: map[policy]*ratelimit.Limiter{},
		},
		counters: counters{rules: map[string]*ruleCounters{}, domains: map[string]*atomic.Uint64{}},
	}
	s.Use(config)
	return s
}

// Use replaces the rules. Requests that have begun keep the old ones.
func (s *Server) Use(config *Config) {
	s.config.Store(config)
	s.counters.configLoads.Add(1)
}

// LoadFailed counts that new rules could not be loaded, so that the old ones stay in force.
func (s *Server) LoadFailed() { s.counters.configLoadErrors.Add(1) }

// Stats returns the numbers of the server.
func (s *Server) Stats() *Stats { return s.counters.snapshot() }

// Register adds the service to a gRPC server, and a health service that says it serves, under the names that the
// reference knows. Its Shutdown says that the server drains. Make the gRPC server with grpc.MaxRecvMsgSize(MaxMessage).
func (s *Server) Register(to grpc.ServiceRegistrar) *health.Server {
	pb.RegisterRateLimitServiceServer(to, s)
	alive := health.NewServer()
	for _, name := range []string{"", "ratelimit", pb.RateLimitService_ServiceDesc.ServiceName} {
		alive.SetServingStatus(name, healthpb.HealthCheckResponse_SERVING)
	}
	healthpb.RegisterHealthServer(to, alive)
	return alive
}

// ShouldRateLimit decides a request.
func (s *Server) ShouldRateLimit(ctx context.Context, request *pb.RateLimitRequest) (*pb.RateLimitResponse, error) {
	if err := check(request); err != nil {
		s.counters.serviceErrors.Add(1)
		return nil, err
	}
	answers := make([]answer, len(request.GetDescriptors()))
	q := &query{
		limiters: &s.limiters, domain: request.GetDomain(), now: s.options.Now, counts: map[string]count{},
	}
	if d := s.config.Load().domains[request.GetDomain()]; d != nil {
		q.asks = asksOf(d, request, answers)
	} else {
		s.unknownDomain(ctx, request.GetDomain())
	}
	err := q.decide(ctx)
	switch {
	case err == nil:
		for _, a := range q.asks {
			s.counters.count(a)
		}
	case ctx.Err() != nil:
		return nil, status.FromContextError(ctx.Err()).Err()
	default:
		s.counters.redisErrors.Add(1)
		if err := s.onFailure(q, err); err != nil {
			return nil, err
		}
	}
	if q.trouble != nil {
		s.counters.redisErrors.Add(1)
	}
	return s.response(request, answers, q.denied()), nil
}

// unknownDomain counts a request for a domain without rules, and logs the domain once. Such a request is allowed, so
// nobody else would notice a misspelt domain.
func (s *Server) unknownDomain(ctx context.Context, name string) {
	made := s.counters.unknownDomain(name)
	switch {
	case made == "":
		return
	case made != name:
		s.options.Logger.WarnContext(ctx, "ratelimit: Envoy asks for more domains without rules; they are not logged")
		return
	}
	shown := strings.ToValidUTF8(name[:min(len(name), 100)], "") // a name may be cut within a character
	s.options.Logger.WarnContext(ctx, "ratelimit: Envoy asks for a domain without rules, so all its requests are "+
		"allowed; is it misspelt, in Envoy or in the file?", "domain", shown)
}

// The texts of the first two errors are those of the reference, and Unknown is its code.
func check(request *pb.RateLimitRequest) error {
	switch descriptors := request.GetDescriptors(); {
	case request.GetDomain() == "":
		return status.Error(codes.Unknown, "rate limit domain must not be empty")
	case len(descriptors) == 0:
		return status.Error(codes.Unknown, "rate limit descriptor list must not be empty")
	case len(descriptors) > MaxDescriptors:
		return status.Errorf(codes.InvalidArgument, "the request has %d descriptors; it may have %d",
			len(descriptors), MaxDescriptors)
	}
	for i, d := range request.GetDescriptors() {
		if n := len(d.GetEntries()); n > MaxEntries {
			return status.Errorf(codes.InvalidArgument,
				"descriptor %d has %d entries; it may have %d", i, n, MaxEntries)
		}
		if own := d.GetLimit(); own != nil && seconds(pb.RateLimitResponse_RateLimit_Unit(own.GetUnit())) == 0 {
			return status.Errorf(codes.InvalidArgument, "the limit of descriptor %d has no unit", i)
		}
	}
	return nil
}

// answer is what a descriptor is answered with. At most one of its fields is set.
type answer struct {
	ask       *ask
	unlimited bool
}

// asksOf finds the limits of the descriptors, and puts them into answers. It returns those that count.
func asksOf(d *domain, request *pb.RateLimitRequest, answers []answer) (asks []*ask) {
	found := make([]*match, len(answers))
	replaced := map[string]bool{}
	for i, descriptor := range request.GetDescriptors() {
		m := d.find(descriptor)
		if m == nil {
			continue
		}
		for _, name := range m.limit.replaces {
			replaced[name] = true
		}
		found[i] = m
	}
	for i, m := range found {
		switch {
		case m == nil:
		case m.limit.unlimited:
			answers[i].unlimited = true
		case m.limit.name != "" && replaced[m.limit.name]:
		default:
			descriptor := request.GetDescriptors()[i]
			answers[i].ask = &ask{
				match: m, key: keyOf(m.counted, m.limit.unit), total: int64(m.limit.perUnit),
				hits: hitsOf(request, descriptor), back: descriptor.GetIsNegativeHits(),
			}
			asks = append(asks, answers[i].ask)
		}
	}
	return asks
}

// hitsOf returns how many hits a descriptor takes. More than any limit is as good as one more than the largest.
func hitsOf(request *pb.RateLimitRequest, descriptor *ratelimitv3.RateLimitDescriptor) int64 {
	if own := descriptor.GetHitsAddend(); own != nil {
		return int64(min(own.GetValue(), most))
	}
	return max(int64(request.GetHitsAddend()), 1)
}

// onFailure answers a request that the database did not decide, or returns an error.
func (s *Server) onFailure(q *query, err error) error {
	if s.options.OnFailure == Fail || !pg.IsAway(err) {
		return status.Error(codes.Unavailable, "the database does not decide: "+ratelimit.ErrorKind(err))
	}
	for _, a := range q.asks {
		a.over, a.remaining, a.at = s.options.OnFailure == Deny && !a.back, 0, s.options.Now()
	}
	return nil
}

func (s *Server) response(request *pb.RateLimitRequest, answers []answer, denied bool) *pb.RateLimitResponse {
	response := &pb.RateLimitResponse{
		OverallCode: pb.RateLimitResponse_OK,
		Statuses:    make([]*pb.RateLimitResponse_DescriptorStatus, len(answers)),
	}
	var passed []*match
	var tightest *pb.RateLimitResponse_DescriptorStatus
	least := uint32(math.MaxUint32)
	for i, a := range answers {
		st := a.status()
		response.Statuses[i] = st
		over := st.GetCode() == pb.RateLimitResponse_OVER_LIMIT
		if st.GetCurrentLimit() != nil && (st.GetLimitRemaining() < least || over && !a.ask.limit.quota) {
			tightest, least = st, st.GetLimitRemaining()
		}
		if a.ask != nil && !over {
			passed = append(passed, a.ask.match)
		}
	}
	if denied {
		response.OverallCode = pb.RateLimitResponse_OVER_LIMIT
	}
	if denied && s.options.ShadowMode {
		response.OverallCode = pb.RateLimitResponse_OK
		s.counters.globalShadowMode.Add(1)
	}
	if tightest != nil {
		response.ResponseHeadersToAdd = s.options.Headers.of(tightest)
	}
	if s.options.DynamicMetadata {
		response.DynamicMetadata = metadataOf(request, passed)
	}
	return response
}

func (a answer) status() *pb.RateLimitResponse_DescriptorStatus {
	switch {
	case a.unlimited:
		return &pb.RateLimitResponse_DescriptorStatus{
			Code: pb.RateLimitResponse_OK, LimitRemaining: math.MaxUint32,
		}
	case a.ask == nil:
		return &pb.RateLimitResponse_DescriptorStatus{Code: pb.RateLimitResponse_OK}
	}
	st := &pb.RateLimitResponse_DescriptorStatus{
		Code: pb.RateLimitResponse_OK, CurrentLimit: a.ask.limit.message(),
		DurationUntilReset: &durationpb.Duration{Seconds: untilReset(a.ask.limit.unit, a.ask.at)},
	}
	switch {
	case !a.ask.over:
		st.LimitRemaining = uint32(max(min(a.ask.remaining, math.MaxUint32), 0))
	case !a.ask.limit.shadow:
		st.Code = pb.RateLimitResponse_OVER_LIMIT
	}
	return st
}

// untilReset returns the whole seconds from now until the next window begins. At 12:00:00.9, it is 3,600 for an hour.
func untilReset(unit pb.RateLimitResponse_RateLimit_Unit, now time.Time) int64 {
	return seconds(unit) - now.Unix()%seconds(unit)
}

func (h Headers) of(st *pb.RateLimitResponse_DescriptorStatus) (headers []*corev3.HeaderValue) {
	for _, header := range []struct {
		name  string
		value int64
	}{
		{h.Limit, int64(st.GetCurrentLimit().GetRequestsPerUnit())},
		{h.Remaining, int64(st.GetLimitRemaining())},
		{h.Reset, st.GetDurationUntilReset().GetSeconds()},
	} {
		if header.name != "" {
			headers = append(headers, &corev3.HeaderValue{Key: header.name, Value: strconv.FormatInt(header.value, 10)})
		}
	}
	return headers
}
