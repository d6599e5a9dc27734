package envoy_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/service/internal/envoy"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// filesIn returns the files of a folder in testdata.
func filesIn(t testing.TB, folder string) map[string][]byte {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join("testdata", folder, "*.yaml"))
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	files := map[string][]byte{}
	for _, path := range paths {
		files[filepath.Base(path)], err = os.ReadFile(path)
		require.NoError(t, err)
	}
	return files
}

func load(t testing.TB, files map[string][]byte) *envoy.Config {
	t.Helper()
	config, err := envoy.Load(files)
	require.NoError(t, err)
	return config
}

// rules returns the configuration of a file.
func rules(t testing.TB, content string) *envoy.Config {
	t.Helper()
	return load(t, map[string][]byte{"rules.yaml": []byte(content)})
}

// clock is a clock that a test sets.
type clock struct{ now time.Time }

func newServer(t testing.TB, db ratelimit.DBTX, c *clock, config *envoy.Config, options envoy.Options) *envoy.Server {
	t.Helper()
	now := func() time.Time { return c.now }
	client, err := ratelimit.NewClient(db, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: now}})
	require.NoError(t, err)
	options.Client, options.Now = client, now
	return envoy.New(options, config)
}

// ask sends a request of the model to the server, and returns the answer in the model's form.
func ask(ctx context.Context, t testing.TB, server *envoy.Server, q modelRequest) modelAnswer {
	t.Helper()
	response, err := server.ShouldRateLimit(ctx, message(t, q))
	if err != nil {
		return modelAnswer{Error: status.Code(err).String() + ": " + status.Convert(err).Message()}
	}
	answer := modelAnswer{Overall: response.GetOverallCode().String()}
	for _, s := range response.GetStatuses() {
		got := modelStatus{
			Code: s.GetCode().String(), Remaining: s.GetLimitRemaining(), Reset: s.GetDurationUntilReset().GetSeconds(),
		}
		if limit := s.GetCurrentLimit(); limit != nil {
			got.Limit = strconv.Itoa(int(limit.GetRequestsPerUnit())) + " per " + limit.GetUnit().String()
			if limit.GetName() != "" {
				got.Limit = limit.GetName() + ": " + got.Limit
			}
		}
		answer.Statuses = append(answer.Statuses, got)
	}
	return answer
}

func message(t testing.TB, q modelRequest) *pb.RateLimitRequest {
	t.Helper()
	request := &pb.RateLimitRequest{Domain: q.Domain, HitsAddend: q.Hits}
	for _, d := range q.Descriptors {
		descriptor := &ratelimitv3.RateLimitDescriptor{IsNegativeHits: d.Negative}
		for _, e := range d.Entries {
			descriptor.Entries = append(descriptor.Entries, &ratelimitv3.RateLimitDescriptor_Entry{Key: e[0], Value: e[1]})
		}
		if d.Hits != nil {
			descriptor.HitsAddend = wrapperspb.UInt64(*d.Hits)
		}
		if d.Limit != nil {
			n, err := strconv.ParseUint(d.Limit[0], 10, 32)
			require.NoError(t, err)
			descriptor.Limit = &ratelimitv3.RateLimitDescriptor_RateLimitOverride{
				RequestsPerUnit: uint32(n),
				// The type of this field has no WEEK, but the numbers are those of the answer's type, which has.
				Unit: typev3.RateLimitUnit(pb.RateLimitResponse_RateLimit_Unit_value[strings.ToUpper(d.Limit[1])]),
			}
		}
		request.Descriptors = append(request.Descriptors, descriptor)
	}
	return request
}
