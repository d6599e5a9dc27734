package livepage

import (
	"bytes"
	"embed"
	"html/template"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

//go:embed page.html page.css page.js
var files embed.FS

const (
	tick          = time.Second     // between two events
	writeDeadline = 5 * time.Second // how long a reader of events may take to read one
)

// ServeHTTP serves the page. All its parts have the same path, and differ by the query, so that the page can be mounted
// anywhere.
func (p *Page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	head := w.Header()
	head.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "+
		"img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'")
	head.Set("X-Content-Type-Options", "nosniff")
	head.Set("Referrer-Policy", "no-referrer")
	head.Set("Cache-Control", "no-store")
	switch {
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		head.Set("Allow", "GET, HEAD")
		http.Error(w, "this page can only be read: use GET", http.StatusMethodNotAllowed)
		return
	case !p.config.AnyAddress && !isLocal(r):
		http.Error(w, "this page is only for programs on the host of the application, and not for a request that a "+
			"proxy has forwarded; livepage.Config.AnyAddress shows it to everybody who can reach it",
			http.StatusForbidden)
		return
	}
	query := r.URL.Query()
	foreign := r.Header.Get("Sec-Fetch-Site") == "cross-site"
	switch file, ask := query.Get("file"), query.Get("ask"); {
	case file == "page.css":
		p.file(w, "text/css; charset=utf-8", file)
	case file == "page.js":
		p.file(w, "text/javascript; charset=utf-8", file)
	case file != "":
		http.NotFound(w, r)
	case foreign && (ask != "" || query.Has("events")):
		http.Error(w, "another site may not ask for this", http.StatusForbidden)
	case query.Has("events"):
		p.events(w, r)
	case ask != "":
		p.write(w, p.view(nil, p.answer(r.Context(), ask, query.Get("limiter"))))
	default:
		p.write(w, p.view(nil, nil))
	}
}

// isLocal tells whether a request comes from this host, and from no proxy. A host name that is not of this host may be
// that of a site that has its name resolved to this host (DNS rebinding).
func isLocal(r *http.Request) bool {
	if r.Header.Get("Forwarded") != "" || r.Header.Get("X-Forwarded-For") != "" || r.Header.Get("X-Real-Ip") != "" {
		return false
	}
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil || !from.Addr().Unmap().IsLoopback() {
		return false
	}
	host := r.Host
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	address, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return host == "localhost" || err == nil && address.IsLoopback()
}

func (p *Page) file(w http.ResponseWriter, kind, name string) {
	text, _ := files.ReadFile(name) // exists
	w.Header().Set("Content-Type", kind)
	_, _ = w.Write(text) // fails only if the client has left
}

func (p *Page) write(w http.ResponseWriter, v *view) {
	html, err := render("page", v)
	if err != nil {
		http.Error(w, "the page cannot be drawn", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = w.Write(html) // fails only if the client has left
}

// events sends the numbers every second, as HTML. Each reader has its own goroutine, which is that of its request. So a
// slow reader delays nobody, and is cut off after writeDeadline.
func (p *Page) events(w http.ResponseWriter, r *http.Request) {
	select {
	case p.streams <- struct{}{}:
		defer func() { <-p.streams }()
	default:
		http.Error(w, "too many pages are open; reload this page to see its numbers", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // nginx would wait for more
	control := http.NewResponseController(w)
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	var last *view
	for {
		last = p.view(last, nil)
		html, err := render("numbers", last)
		if err != nil {
			return
		}
		// The ResponseWriter of a middleware may have no deadlines. Then the server's time-outs count.
		_ = control.SetWriteDeadline(time.Now().Add(writeDeadline))
		_, err = io.WriteString(w, "data: "+string(bytes.ReplaceAll(html, []byte("\n"), []byte("\ndata: ")))+"\n\n")
		if err != nil || control.Flush() != nil {
			return
		}
		select {
		case <-ticker.C:
		case <-p.closed:
			return
		case <-r.Context().Done():
			return
		}
	}
}

// render returns a part of the page. The template is parsed each time: nobody waits for it.
func render(part string, v *view) ([]byte, error) {
	t, err := template.ParseFS(files, "page.html")
	if err != nil {
		return nil, err
	}
	var html bytes.Buffer
	err = t.ExecuteTemplate(&html, part, v)
	return html.Bytes(), err
}

// rate returns a number per second.
func rate(n int64, over time.Duration) string {
	if over <= 0 {
		return "0"
	}
	perSecond := float64(n) / over.Seconds()
	if perSecond > 0 && perSecond < 10 {
		return strconv.FormatFloat(perSecond, 'f', 1, 64)
	}
	return strconv.FormatFloat(perSecond, 'f', 0, 64)
}
