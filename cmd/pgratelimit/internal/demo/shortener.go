package demo

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"log/slog"
	"mime"
	"net/http"
	"net/url"
	"strings"
	"sync"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
)

// shortener makes short links, and keeps them in memory.
type shortener struct {
	base  string   // the first part of every short link
	links sync.Map // maps the code of a link to its URL
}

// newShortener returns the web application: POST /shorten makes a short link, and GET follows a link. Only POST is
// limited.
func newShortener(base string, limiter *ratelimit.Limiter) (http.Handler, error) {
	limit, err := httplimit.New(limiter, httplimit.Config{
		Key: httplimit.ByIP(), Headers: httplimit.XRateLimit, Logger: slog.Default(),
	})
	if err != nil {
		return nil, err
	}
	s := &shortener{base: base}
	mux := http.NewServeMux()
	mux.Handle("POST /shorten", limit(http.HandlerFunc(s.shorten)))
	mux.HandleFunc("GET /{code}", s.follow)
	return mux, nil
}

func (s *shortener) shorten(w http.ResponseWriter, r *http.Request) {
	long, err := readURL(w, r)
	if err != nil {
		respond(w, http.StatusBadRequest, map[string]string{"error": err.Error()})
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
		respond(w, http.StatusNotFound, map[string]string{"error": "there is no such link"})
		return
	}
	http.Redirect(w, r, long.(string), http.StatusFound)
}

// readURL returns the URL in a form or a JSON object.
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

func respond(w http.ResponseWriter, status int, body map[string]string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // fails only if the client has closed the connection
}
