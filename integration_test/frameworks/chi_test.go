package frameworks

import (
	"io"
	"net/http"
	"testing"

	"github.com/go-chi/chi/v5"
	"github.com/go-chi/chi/v5/middleware"
)

// chi uses middleware of net/http directly.
func testChi(t *testing.T) {
	r := chi.NewRouter()
	r.Use(middleware.Recoverer, func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			next.ServeHTTP(middleware.NewWrapResponseWriter(w, r.ProtoMajor), r) // chi's logger wraps the writer in the same way
			if r.URL.Path == overruled {
				w.WriteHeader(http.StatusUnauthorized)
			}
		})
	})
	r.Use(newLimit(t))
	r.Get(good, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "welcome") })
	r.Get(nothing, func(http.ResponseWriter, *http.Request) {})
	r.Get(wrong, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) })
	r.Get(refused, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusUnauthorized) })
	r.Get(panics, func(http.ResponseWriter, *http.Request) { panic("oh") })
	r.Get(failedCopy, func(w http.ResponseWriter, _ *http.Request) {
		if _, err := io.Copy(w, upstream); err != nil {
			http.Error(w, "no", http.StatusUnauthorized)
		}
	})
	r.Get(overruled, func(http.ResponseWriter, *http.Request) {})
	r.Get(hijacked, func(w http.ResponseWriter, _ *http.Request) { writeRaw(http.NewResponseController(w).Hijack()) })
	requireCharges(t, served(t, r), true, false)
}
