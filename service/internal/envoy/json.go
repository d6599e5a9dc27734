package envoy

import (
	"fmt"
	"io"
	"net/http"
	"time"

	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/pgratelimit/ratelimit/service/internal/web"
)

// bodyTime is how long a body may take.
const bodyTime = 10 * time.Second

// JSON returns a handler that answers requests in the JSON form of the protocol, as the reference does at /json. Its
// status is 200 for OK, 429 for OVER_LIMIT, 400 for a request that cannot be answered, and 500 if the database does not
// decide.
func (s *Server) JSON() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		bad := func(detail string) {
			web.Refuse(w, http.StatusBadRequest, "The request cannot be answered.", detail)
		}
		control := http.NewResponseController(w)
		_ = control.SetReadDeadline(time.Now().Add(bodyTime)) // a ResponseWriter of a test has none
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, MaxMessage))
		if err != nil {
			bad(fmt.Sprintf("The body did not arrive as a whole. Send at most %d bytes within %v.",
				MaxMessage, bodyTime))
			return
		}
		_ = control.SetReadDeadline(time.Time{})
		var request pb.RateLimitRequest
		if err := protojson.Unmarshal(body, &request); err != nil { // the error may have a key
			bad("The body is no RateLimitRequest of envoy.service.ratelimit.v3 in JSON.")
			return
		}
		response, err := s.ShouldRateLimit(r.Context(), &request)
		switch status.Code(err) {
		case codes.OK:
		case codes.Unknown, codes.InvalidArgument:
			bad(status.Convert(err).Message())
			return
		default:
			web.Refuse(w, http.StatusInternalServerError, "The service cannot decide for now.",
				status.Convert(err).Message())
			return
		}
		text, err := protojson.Marshal(response)
		if err != nil {
			web.Refuse(w, http.StatusInternalServerError, "The service failed.", "")
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if response.GetOverallCode() == pb.RateLimitResponse_OVER_LIMIT {
			w.WriteHeader(http.StatusTooManyRequests)
		}
		_, _ = w.Write(text)
	})
}
