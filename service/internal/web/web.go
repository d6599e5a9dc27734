// Package web answers requests over HTTP with JSON. Keys are in bodies, because URLs are logged.
package web

import (
	"bytes"
	"context"
	"crypto/subtle"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"regexp"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
)

//go:embed openapi.yaml
var openAPI []byte

// Options has what a handler needs.
type Options struct {
	Limiters interface {
		Limiter(name string) (*ratelimit.Limiter, bool)
	}
	DB     *pgxpool.Pool // asked for slots only, which no process renews here
	Schema string        // the schema of the functions; defaults to "": search_path finds it
	Token  string        // what callers must send as Authorization: Bearer; defaults to "": nothing
	// Headers are the header fields of answers. None, the zero value, is IETFDraft11.
	Headers  httplimit.Headers
	MaxBody  int64         // in bytes; defaults to 64 KiB
	MaxWait  time.Duration // the longest timeout of a request that waits; defaults to 1 minute
	BodyTime time.Duration // the longest time in which a body arrives; defaults to 10 seconds
	Timeout  time.Duration // of a statement for slots; defaults to 1 second
	// Logger gets a line for an error that an operator must mend. It gets no key. Defaults to slog.Default().
	Logger *slog.Logger
}

type handler struct {
	Options
	routes map[string]http.HandlerFunc
	faults faults
}

// New returns a handler. It limits the size of a body, and the time in which it arrives. The http.Server must limit the
// rest: see [Server].
func New(o Options) http.Handler {
	if o.Headers == httplimit.None {
		o.Headers = httplimit.IETFDraft11
	}
	if o.MaxBody == 0 {
		o.MaxBody = 64 << 10
	}
	if o.MaxWait == 0 {
		o.MaxWait = time.Minute
	}
	if o.BodyTime == 0 {
		o.BodyTime = 10 * time.Second
	}
	if o.Timeout == 0 {
		o.Timeout = time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	h := &handler{Options: o}
	h.routes = map[string]http.HandlerFunc{
		"/v1/ask":     endpoint(h, h.ask),
		"/v1/look":    endpoint(h, h.look),
		"/v1/wait":    endpoint(h, h.wait),
		"/v1/all":     endpoint(h, h.all),
		"/v1/refund":  endpoint(h, h.refund),
		"/v1/charge":  endpoint(h, h.charge),
		"/v1/hold":    endpoint(h, h.hold),
		"/v1/settle":  endpoint(h, h.settle),
		"/v1/cancel":  endpoint(h, h.cancel),
		"/v1/extend":  endpoint(h, h.extend),
		"/v1/acquire": endpoint(h, h.acquire),
		"/v1/renew":   endpoint(h, h.renew),
		"/v1/release": endpoint(h, h.release),
	}
	return h
}

// Server returns a server that ends connections of clients that are slow or idle. It has no WriteTimeout, because a
// request may wait.
func Server(h http.Handler) *http.Server {
	return &http.Server{
		Handler: h, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 16 << 10,
	}
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	route, known := h.routes[r.URL.Path]
	method := http.MethodPost
	if r.URL.Path == "/openapi.yaml" {
		route, known, method = document, true, http.MethodGet
	}
	switch {
	case !IsToken(h.Token, r.Header.Values("Authorization")):
		RefuseToken(w, r)
	case !known:
		problem{Status: http.StatusNotFound, Title: "There is no such path.",
			Detail: "GET /openapi.yaml describes all paths."}.write(w)
	case r.Method != method:
		RefuseMethod(method)(w, r)
	default:
		route(w, r)
	}
}

func document(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/yaml")
	_, _ = w.Write(openAPI)
}

// IsToken returns whether the values of a header field Authorization are the token alone, or whether there is no token.
// It takes as long for all wrong tokens of the same length.
func IsToken(token string, values []string) bool {
	if token == "" {
		return true
	}
	if len(values) != 1 {
		return false
	}
	scheme, sent, _ := strings.Cut(values[0], " ")
	return strings.EqualFold(scheme, "Bearer") && subtle.ConstantTimeCompare([]byte(sent), []byte(token)) == 1
}

// RefuseToken answers a request without the token.
func RefuseToken(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("WWW-Authenticate", "Bearer")
	Refuse(w, http.StatusUnauthorized, "The token is missing or wrong.", "Send the header Authorization: Bearer TOKEN.")
}

// RefuseMethod returns a handler for requests with another method than those that a path has, such as GET, HEAD.
func RefuseMethod(methods string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Allow", methods)
		Refuse(w, http.StatusMethodNotAllowed, "The path has another method.",
			"Use "+strings.ReplaceAll(methods, ", ", " or ")+".")
	}
}

// answer is what an endpoint answers if there is no error.
type answer interface{ status() int }

// endpoint returns a handler that reads a request Q, and writes the answer or the problem.
func endpoint[Q any](
	h *handler, do func(ctx context.Context, header http.Header, request *Q) (answer, error),
) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var request Q
		err := h.read(w, r, &request)
		var a answer
		if err == nil {
			a, err = do(r.Context(), w.Header(), &request)
		}
		if err != nil {
			h.fail(w, r, err)
			return
		}
		text, err := json.Marshal(a)
		if err != nil {
			h.fail(w, r, err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(a.status())
		_, _ = w.Write(append(text, '\n')) // fails only if the client has left
	}
}

// read reads a body into request.
func (h *handler) read(w http.ResponseWriter, r *http.Request, request any) error {
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return problem{Status: http.StatusUnsupportedMediaType, Title: "The body must be JSON.",
			Detail: "Send the header Content-Type: application/json (curl: --json)."}
	}
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(h.BodyTime)) // a ResponseWriter of a test has none
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, h.MaxBody))
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		return problem{Status: http.StatusRequestEntityTooLarge, Title: "The body is too large.",
			Detail: fmt.Sprintf("It may have %d bytes.", h.MaxBody)}
	}
	if err != nil {
		w.Header().Set("Connection", "close")
		return problem{Status: http.StatusBadRequest, Title: "The body did not arrive as a whole.",
			Detail: fmt.Sprintf("Send it within %v.", h.BodyTime)}
	}
	_ = control.SetReadDeadline(time.Time{}) // otherwise it would end a request that waits
	if !utf8.Valid(body) {
		return problem{Status: http.StatusBadRequest, Title: "The body is not UTF-8."}
	}
	return decode(body, request)
}

// embedded matches the names of structs in the path of a field, which are not in JSON.
var embedded = regexp.MustCompile(`(\w+Request|subject)\.`)

// decode decodes a body, which is a single JSON object with known fields. An error names the field.
func decode(body []byte, request any) error {
	bad := func(field, detail string) error {
		return problem{Status: http.StatusBadRequest, Title: "The body is not a request of this path.",
			Field: field, Detail: detail}
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(request)
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		what := map[string]string{"string": "a string", "int64": "a whole number from -2^63 to 2^63 - 1",
			"float64": "a number"}[wrong.Type.String()]
		if what == "" {
			what = "a JSON object or list as in /openapi.yaml"
		}
		return bad(embedded.ReplaceAllString(wrong.Field, ""), "It must be "+what+".")
	}
	if err != nil {
		if unknown, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
			return bad(strings.Trim(unknown, `"`), noSuchField(request))
		}
		return bad("", "It is not JSON: it is empty, cut off or misspelt.")
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return bad("", "Something follows the JSON object; send one object.")
	}
	if text := bytes.TrimSpace(body); text[0] != '{' { // null decodes into anything
		return bad("", "It must be a JSON object.")
	}
	if field, mistake := checkText(body, request); mistake != "" {
		return bad(field, mistake)
	}
	return nil
}
