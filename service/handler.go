package service

import (
	"context"
	"net/http"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/ratelimit/service/internal/web"
)

// handler returns the handler of the HTTP listener.
func (s *service) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { say(w, http.StatusOK, "ok") })
	mux.HandleFunc("GET /readyz", s.readyz)
	mux.Handle("GET /metrics", s.protect(s.metrics.handler(), func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("WWW-Authenticate", "Bearer")
		say(w, http.StatusUnauthorized, noToken+"header Authorization: Bearer TOKEN")
	}))
	mux.Handle("POST /json", s.metrics.measured(s.protect(s.envoy.JSON(), web.RefuseToken)))
	mux.Handle("/{$}", s.page) // for this machine only: see package livepage
	// Other methods of these paths would go to the handler of "/", which does not know them.
	for path, methods := range map[string]string{
		"/healthz": "GET, HEAD", "/readyz": "GET, HEAD", "/metrics": "GET, HEAD", "/json": "POST",
	} {
		mux.Handle(path, s.metrics.measured(web.RefuseMethod(methods)))
	}
	mux.Handle("/", s.metrics.measured(web.New(web.Options{
		Limiters: &s.config, DB: s.DB, Schema: s.Schema, Token: s.Token, Timeout: s.Timeout, Logger: s.Logger,
	})))
	return mux
}

func say(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	_, _ = w.Write([]byte(text + "\n"))
}

// readyz says whether a load balancer may send requests.
func (s *service) readyz(w http.ResponseWriter, _ *http.Request) {
	switch {
	case s.draining.Load():
		say(w, http.StatusServiceUnavailable, "the service is ending")
	case !s.answered.Load():
		say(w, http.StatusServiceUnavailable, "the database has not answered yet")
	default:
		say(w, http.StatusOK, "ready")
	}
}

const noToken = "the token is missing or wrong; send the "

// protect asks for the token, if there is one, and calls refuse without it.
func (s *service) protect(h http.Handler, refuse http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !web.IsToken(s.Token, r.Header.Values("Authorization")) {
			refuse(w, r)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// authorize asks callers over gRPC for the token, but not those who ask for the health.
func (s *service) authorize(
	ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	if err := s.mayCall(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	return handler(ctx, request)
}

// authorizeStream does the same for streams, which only the health and the list of methods have.
func (s *service) authorizeStream(
	server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler,
) error {
	if err := s.mayCall(stream.Context(), info.FullMethod); err != nil {
		return err
	}
	return handler(server, stream)
}

func (s *service) mayCall(ctx context.Context, method string) error {
	if strings.HasPrefix(method, "/"+healthpb.Health_ServiceDesc.ServiceName+"/") ||
		web.IsToken(s.Token, metadata.ValueFromIncomingContext(ctx, "authorization")) {
		return nil
	}
	return status.Error(codes.Unauthenticated, noToken+"metadata authorization: Bearer TOKEN")
}
