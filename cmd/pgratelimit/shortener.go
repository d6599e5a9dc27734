package main

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// limited lets requests through to next as long as the limiter allows their client.
//
// The client is the address that the connection comes from. Behind a proxy that is the proxy, for all clients alike: take
// the address from what your proxy sends then, and from nobody else. With IPv6, take the first 64 bits: a client has them all.
func limited(limiter *ratelimit.Limiter, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		client, _, err := net.SplitHostPort(r.RemoteAddr)
		if err != nil {
			respondError(w, http.StatusInternalServerError, "the client has no address")
			return
		}
		result, err := limiter.Allow(r.Context(), client)
		if err != nil {
			// Not 429: the client has done nothing wrong. To fail open instead, go on to next.
			if r.Context().Err() == nil { // the client is still there
				slog.ErrorContext(r.Context(), "no decision on a request", "error", err)
			}
			respondError(w, http.StatusServiceUnavailable, "try again later")
			return
		}

		w.Header().Set("X-RateLimit-Limit", strconv.FormatInt(result.Limit, 10))
		w.Header().Set("X-RateLimit-Remaining", strconv.FormatInt(result.Remaining, 10))
		if !result.Allowed {
			w.Header().Set("Retry-After", strconv.FormatInt(wholeSeconds(result.RetryAfter), 10))
			respondError(w, http.StatusTooManyRequests, "too many requests")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// wholeSeconds is what Retry-After wants: rounded up, because a client that comes too early is denied again, and at least 1.
func wholeSeconds(d time.Duration) int64 {
	return int64(max((d+time.Second-1)/time.Second, 1))
}

// shortener makes short links, and forgets them when the process ends.
type shortener struct {
	base  string   // what short links begin with
	links sync.Map // from code to URL
}

// newShortener returns the demo's web application: POST /shorten makes a short link, and GET follows it. Only the first is limited.
func newShortener(base string, limiter *ratelimit.Limiter) http.Handler {
	s := &shortener{base: base}
	mux := http.NewServeMux()
	mux.Handle("POST /shorten", limited(limiter, http.HandlerFunc(s.shorten)))
	mux.HandleFunc("GET /{code}", s.follow)
	return mux
}

func (s *shortener) shorten(w http.ResponseWriter, r *http.Request) {
	long, err := readURL(w, r)
	if err != nil {
		respondError(w, http.StatusBadRequest, err.Error())
		return
	}
	code := strings.ToLower(rand.Text()[:8])
	s.links.Store(code, long)

	short := s.base + "/" + code
	w.Header().Set("Location", short)
	respond(w, http.StatusCreated, map[string]string{"short": short, "url": long})
}

func (s *shortener) follow(w http.ResponseWriter, r *http.Request) {
	long, ok := s.links.Load(r.PathValue("code"))
	if !ok {
		respondError(w, http.StatusNotFound, "there is no such link")
		return
	}
	http.Redirect(w, r, long.(string), http.StatusFound)
}

// readURL returns the url that a form or a JSON object holds.
func readURL(w http.ResponseWriter, r *http.Request) (string, error) {
	r.Body = http.MaxBytesReader(w, r.Body, 1<<16)

	var body struct {
		URL string `json:"url"`
	}
	if mediaType, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type")); mediaType == "application/json" {
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			return "", errors.New("the body is not the JSON of an object with a url")
		}
	} else {
		body.URL = r.PostFormValue("url")
	}

	parsed, err := url.Parse(body.URL)
	if err != nil || parsed.Scheme != "http" && parsed.Scheme != "https" || parsed.Host == "" {
		return "", errors.New("url must be an http or https URL")
	}
	return parsed.String(), nil
}

func respondError(w http.ResponseWriter, status int, message string) {
	respond(w, status, map[string]string{"error": message})
}

func respond(w http.ResponseWriter, status int, body map[string]string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // fails only if the client has left
}
