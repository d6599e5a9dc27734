package frameworks

import (
	"io"
	"net/http"
	"testing"

	"github.com/go-chi/chi/v5"
	"github.com/go-chi/chi/v5/middleware"
)

// chi takes net/http's middleware as it is.
func testChi(t *testing.T) {
	r := chi.NewRouter()
	r.Use(middleware.Recoverer)
	r.Use(newLimit(t))
	r.Get(good, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "welcome") })
	r.Get(nothing, func(http.ResponseWriter, *http.Request) {})
	r.Get(wrong, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) })
	r.Get(refused, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusUnauthorized) })
	r.Get(panics, func(http.ResponseWriter, *http.Request) { panic("oh") })
	requireCharges(t, served(t, r), true, false)
}
