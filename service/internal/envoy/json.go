package envoy

import (
	"io"
	"net/http"

	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
)

// JSON returns a handler that answers requests in the JSON form of the protocol, as the reference does at /json. Its
// status is 200 for OK, 429 for OVER_LIMIT, 400 for a request that cannot be answered, and 500 if the database does not
// decide.
func (s *Server) JSON() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fail := func(code int) { http.Error(w, http.StatusText(code), code) }
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, MaxMessage))
		if err != nil {
			fail(http.StatusBadRequest)
			return
		}
		var request pb.RateLimitRequest
		if err := protojson.Unmarshal(body, &request); err != nil {
			fail(http.StatusBadRequest)
			return
		}
		response, err := s.ShouldRateLimit(r.Context(), &request)
		switch status.Code(err) {
		case codes.OK:
		case codes.Unknown, codes.InvalidArgument:
			fail(http.StatusBadRequest)
			return
		default:
			fail(http.StatusInternalServerError)
			return
		}
		text, err := protojson.Marshal(response)
		if err != nil {
			fail(http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if response.GetOverallCode() == pb.RateLimitResponse_OVER_LIMIT {
			w.WriteHeader(http.StatusTooManyRequests)
		}
		_, _ = w.Write(text)
	})
}
