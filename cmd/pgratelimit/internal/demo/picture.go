package demo

import (
	"bytes"
	"context"
	"embed"
	"html/template"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit"
)

const (
	pictureWindow = 10 * time.Second
	pictureSpan   = 30 * time.Second // the time that the picture shows
	pictureStep   = 500 * time.Millisecond
	pictureKey    = "everybody"
)

//go:embed page
var pageFiles embed.FS

// picture is the page that draws what a fixed and a sliding window do with the same requests.
type picture struct {
	windows [2]*window
}

// window is one of the two windows.
type window struct {
	Name, About string
	limiter     *ratelimit.Limiter

	mu   sync.Mutex
	sent []sent // of the last pictureSpan
}

// sent is a request that was sent.
type sent struct {
	at      time.Time
	allowed bool
}

// bar is a column of the picture: the requests of a pictureStep.
type bar struct{ X, Allowed, Denied, AllowedY, DeniedY int }

// drawn is a window as the page shows it.
type drawn struct {
	Name, About     string
	Remaining       int64
	Limit           int64
	Full            int // in percent
	Retry           string
	Allowed, Denied int // in the picture
	Bars            []bar
	Failed          bool
}

func newPicture(newLimiter func(name string, policy ratelimit.Policy) (*ratelimit.Limiter, error)) (*picture, error) {
	p := &picture{[2]*window{
		{Name: "Fixed window", About: "It begins with its first request, and forgets everything at its end."},
		{Name: "Sliding window", About: "What was taken in one window fades away evenly in the next."},
	}}
	for i, policy := range []ratelimit.Policy{
		ratelimit.FixedWindow{Limit: demoLimit, Window: pictureWindow},
		ratelimit.SlidingWindow{Limit: demoLimit, Window: pictureWindow},
	} {
		limiter, err := newLimiter([]string{"picture-fixed", "picture-sliding"}[i], policy)
		if err != nil {
			return nil, err
		}
		p.windows[i].limiter = limiter
	}
	return p, nil
}

// addTo adds the page to the web server.
func (p *picture) addTo(mux *http.ServeMux) {
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) { p.write(w, r, "page") })
	mux.HandleFunc("GET /page/picture", func(w http.ResponseWriter, r *http.Request) { p.write(w, r, "picture") })
	mux.Handle("GET /page/", http.FileServerFS(pageFiles))
	mux.HandleFunc("POST /page/send", p.send)
}

// send sends a request, or five, to both windows.
func (p *picture) send(w http.ResponseWriter, r *http.Request) {
	n := 1
	if r.PostFormValue("requests") == "5" {
		n = 5
	}
	for range n {
		for _, window := range p.windows {
			if err := window.ask(r.Context()); err != nil {
				http.Error(w, "the limiter has no answer", http.StatusServiceUnavailable)
				return
			}
		}
	}
	http.Redirect(w, r, "/", http.StatusSeeOther)
}

func (w *window) ask(ctx context.Context) error {
	result, err := w.limiter.Allow(ctx, pictureKey)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.forget(time.Now())
	w.sent = append(w.sent, sent{time.Now(), result.Allowed})
	return nil
}

// forget forgets requests that the picture no longer shows. w.mu is held.
func (w *window) forget(now time.Time) {
	w.sent = slices.DeleteFunc(w.sent, func(s sent) bool { return now.Sub(s.at) >= pictureSpan })
}

// draw returns the window as the page shows it.
func (w *window) draw(ctx context.Context) drawn {
	d := drawn{Name: w.Name, About: w.About, Limit: demoLimit, Retry: "now"}
	state, err := w.limiter.Peek(ctx, pictureKey)
	d.Failed, d.Remaining = err != nil, state.Remaining
	d.Full = int(100 * (demoLimit - state.Remaining) / demoLimit)
	if state.RetryAfter > 0 {
		d.Retry = "in " + state.RetryAfter.Round(pictureStep/5).String()
	}
	now := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.forget(now)
	const columns, width, height, unit = int(pictureSpan / pictureStep), 10, 120, 6
	var bars [columns]bar
	for _, s := range w.sent {
		b := &bars[columns-1-min(columns-1, int(now.Sub(s.at)/pictureStep))]
		if s.allowed {
			d.Allowed, b.Allowed = d.Allowed+1, b.Allowed+unit
		} else {
			d.Denied, b.Denied = d.Denied+1, b.Denied+unit
		}
	}
	for i, b := range bars {
		if b.Allowed+b.Denied > 0 {
			b.Allowed = min(b.Allowed, height)
			b.Denied = min(b.Denied, height-b.Allowed)
			b.X, b.AllowedY, b.DeniedY = width*i, height-b.Allowed, height-b.Allowed-b.Denied
			d.Bars = append(d.Bars, b)
		}
	}
	return d
}

func (p *picture) write(w http.ResponseWriter, r *http.Request, part string) {
	t, err := template.ParseFS(pageFiles, "page/page.html")
	var html bytes.Buffer
	if err == nil {
		err = t.ExecuteTemplate(&html, part, []drawn{p.windows[0].draw(r.Context()), p.windows[1].draw(r.Context())})
	}
	if err != nil {
		http.Error(w, "the page cannot be drawn", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Content-Security-Policy", "default-src 'self'; img-src data:; frame-ancestors 'none'")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(html.Bytes()) // fails only if the client has left
}
