package livepage_test

import (
	"bufio"
	"context"
	"html"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/livepage"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

// setup returns a page, its server, and a limiter of 5 an hour in memory.
func setup(t *testing.T, config livepage.Config) (*livepage.Page, *httptest.Server, *ratelimit.Limiter) {
	t.Helper()
	page := livepage.New(config)
	server := httptest.NewServer(page)
	t.Cleanup(server.Close)
	t.Cleanup(page.Close)
	return page, server, limitertest.New(t, ratelimittest.NewDB(), ratelimit.Config{
		Name: "login", Policy: ratelimit.FixedWindow{Limit: 5, Window: time.Hour}, OnFailure: ratelimit.ReturnError(),
	}, ratelimit.ClientConfig{Observer: page.Observer()})
}

func get(t *testing.T, address string) (int, string, http.Header) {
	t.Helper()
	response, err := http.Get(address)
	require.NoError(t, err)
	defer response.Body.Close()
	var body strings.Builder
	_, err = bufio.NewReader(response.Body).WriteTo(&body)
	require.NoError(t, err)
	return response.StatusCode, body.String(), response.Header
}

// stream is an open stream of events.
type stream struct {
	t     *testing.T
	lines *bufio.Scanner
	leave context.CancelFunc
}

func listen(t *testing.T, address string) *stream {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address+"?events", nil)
	require.NoError(t, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	t.Cleanup(func() { response.Body.Close() })
	require.Equal(t, http.StatusOK, response.StatusCode)
	require.Equal(t, "text/event-stream", response.Header.Get("Content-Type"))
	return &stream{t, bufio.NewScanner(response.Body), cancel}
}

// next returns the HTML of the next event.
func (s *stream) next() string {
	s.t.Helper()
	var event strings.Builder
	for s.lines.Scan() {
		data, ok := strings.CutPrefix(s.lines.Text(), "data: ")
		if !ok {
			return event.String()
		}
		event.WriteString(data + "\n")
	}
	require.Fail(s.t, "the stream has ended", "%v", s.lines.Err())
	return ""
}

// totals returns the totals of the limiter login by heading.
func totals(page string) map[string]string {
	found := map[string]string{}
	for _, cell := range regexp.MustCompile(`data-label="([^"]+)"[^>]*>.*?<i>(\d+)</i>`).FindAllStringSubmatch(page, -1) {
		found[cell[1]] = cell[2]
	}
	return found
}

func decide(t *testing.T, limiter *ratelimit.Limiter, key string, n int) {
	t.Helper()
	for range n {
		_, err := limiter.Allow(t.Context(), key)
		require.NoError(t, err)
	}
}

// The numbers of the events and of the page without scripts are those of the decisions since the first look.
func TestNumbers(t *testing.T) {
	t.Parallel()

	_, server, limiter := setup(t, livepage.Config{})
	decide(t, limiter, "before", 3) // nobody looks, so these are not counted
	events := listen(t, server.URL)
	require.Contains(t, events.next(), "No decision since then")
	decide(t, limiter, "user:alice", 9)
	decide(t, limiter, "user:bob", 2)
	_, err := limiter.Peek(t.Context(), "user:alice")
	require.NoError(t, err)
	_, err = limiter.Allow(t.Context(), "")
	require.Error(t, err)

	want := map[string]string{
		"allowed": "7", "denied": "4", "from memory": "3", "leased": "0", "failed open": "0", "failed closed": "0", "errors": "1",
	}
	event := events.next()
	seen := event
	for !maps.Equal(totals(event), want) { // a second has ended between the decisions
		event = events.next()
		seen += event
	}
	require.Regexp(t, `Statements</dt><dd><span><b>[\d.]+</b>/s</span> <i>9</i>`, event)
	require.Contains(t, event, "<bdi>use… #")
	require.Contains(t, event, `<td data-label="denied">4</td>`)
	require.NotContains(t, event, "alice")
	require.Regexp(t, `data-label="allowed"><span><b>[1-9]`, seen)
	require.Contains(t, events.next(), `data-label="allowed"><span><b>0</b>`) // the rate of a second without decisions

	status, page, header := get(t, server.URL)
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, want, totals(page))
	require.Contains(t, page, `<noscript><meta http-equiv="refresh"`)
	require.Contains(t, header.Get("Content-Security-Policy"), "default-src 'none'; script-src 'self';")
	require.NotRegexp(t, `<script>|<style|\son\w+=|style=`, page)
	for file, kind := range map[string]string{"page.css": "text/css", "page.js": "text/javascript"} {
		status, _, header := get(t, server.URL+"?file="+file)
		require.Equal(t, http.StatusOK, status)
		require.Contains(t, header.Get("Content-Type"), kind)
	}
	status, _, _ = get(t, server.URL+"?file=page.html")
	require.Equal(t, http.StatusNotFound, status)
}

func TestHostileKeys(t *testing.T) {
	t.Parallel()

	_, server, limiter := setup(t, livepage.Config{ShowKeys: true})
	get(t, server.URL)
	long := strings.Repeat("k", 512)
	for _, key := range []string{`<script>alert(1)</script>`, "a\u202egnp.exe", "b\ndata: x\n\nevent: y", "שלום", long, `"'><img src=x>`} {
		decide(t, limiter, key, 6)
	}
	_, page, _ := get(t, server.URL)
	event := listen(t, server.URL).next()
	for _, text := range []string{page, event} {
		require.NotContains(t, text, "<script>")
		require.NotContains(t, text, "<img")
		require.NotContains(t, text, "\u202e")
		require.Contains(t, text, html.EscapeString(`<script>alert(1)</script>`))
		require.Contains(t, text, `a\u202egnp.exe`)
		require.Contains(t, text, `b\ndata: x\n\nevent: y`)
		require.Contains(t, text, "<bdi>שלום</bdi>")
		require.Contains(t, text, long)
	}
}

// A reader that does not read delays neither decisions nor other readers, and its goroutine ends with it.
func TestSlowReader(t *testing.T) {
	t.Parallel()

	page, server, limiter := setup(t, livepage.Config{})
	slow := &stuck{ResponseRecorder: httptest.NewRecorder(), began: make(chan struct{}), free: make(chan struct{})}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		request := httptest.NewRequest(http.MethodGet, "http://localhost/?events", nil)
		request.RemoteAddr = "127.0.0.1:5"
		page.ServeHTTP(slow, request)
	}()
	<-slow.began
	decide(t, limiter, "a", 8)
	events := listen(t, server.URL)
	require.Equal(t, "3", totals(events.next())["denied"])
	decide(t, limiter, "a", 1)
	for totals(events.next())["denied"] != "4" {
	}
	close(slow.free)
	page.Close()
	<-ended
}

// stuck is a ResponseWriter whose client does not read.
type stuck struct {
	*httptest.ResponseRecorder
	began, free chan struct{}
	once        sync.Once
}

func (s *stuck) WriteString(text string) (int, error) {
	s.once.Do(func() { close(s.began) })
	<-s.free
	return len(text), nil
}

// At most 16 readers get events. Readers who leave make room, and leave no goroutine.
func TestReadersLeave(t *testing.T) {
	t.Parallel()

	count := testkit.Offspring(t, func(ctx context.Context) {
		_, server, limiter := setup(t, livepage.Config{})
		var streams []*stream
		for range 16 {
			s := listen(t, server.URL)
			s.next()
			streams = append(streams, s)
		}
		status, body, _ := get(t, server.URL+"?events")
		require.Equal(t, http.StatusServiceUnavailable, status)
		require.Contains(t, body, "too many pages")
		decide(t, limiter, "a", 1)
		for _, s := range streams {
			s.leave()
		}
		testkit.WaitUntil(t, func() bool {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+"?events", nil)
			require.NoError(t, err)
			response, err := http.DefaultClient.Do(request)
			require.NoError(t, err)
			response.Body.Close()
			return response.StatusCode == http.StatusOK
		})
		server.CloseClientConnections()
		server.Close()
	})
	testkit.WaitUntil(t, func() bool { return count() == 0 })
}

func TestOnlyForThisHost(t *testing.T) {
	t.Parallel()

	ask := func(config livepage.Config, change func(r *http.Request)) *httptest.ResponseRecorder {
		request := httptest.NewRequest(http.MethodGet, "http://localhost:8080/debug/ratelimit", nil)
		request.RemoteAddr = "127.0.0.1:4242"
		change(request)
		recorder := httptest.NewRecorder()
		livepage.New(config).ServeHTTP(recorder, request)
		return recorder
	}
	for name, change := range map[string]func(r *http.Request){
		"another host":     func(r *http.Request) { r.RemoteAddr = "203.0.113.5:4242" },
		"a proxy":          func(r *http.Request) { r.Header.Set("X-Forwarded-For", "203.0.113.5") },
		"a standard proxy": func(r *http.Request) { r.Header.Set("Forwarded", "for=203.0.113.5") },
		"DNS rebinding":    func(r *http.Request) { r.Host = "evil.example:8080" },
		"no address":       func(r *http.Request) { r.RemoteAddr = "@" },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			refused := ask(livepage.Config{}, change)
			require.Equal(t, http.StatusForbidden, refused.Code)
			require.Contains(t, refused.Body.String(), "livepage.Config.AnyAddress")
			require.Equal(t, http.StatusOK, ask(livepage.Config{AnyAddress: true}, change).Code)
		})
	}
	for _, change := range []func(r *http.Request){
		func(*http.Request) {},
		func(r *http.Request) { r.RemoteAddr, r.Host = "[::1]:4242", "[::1]:8080" },
		func(r *http.Request) { r.RemoteAddr = "[::ffff:127.0.0.1]:4242" },
	} {
		require.Equal(t, http.StatusOK, ask(livepage.Config{}, change).Code)
	}
	require.Equal(t, http.StatusMethodNotAllowed, ask(livepage.Config{}, func(r *http.Request) { r.Method = http.MethodPost }).Code)
	require.Equal(t, http.StatusForbidden, ask(livepage.Config{}, func(r *http.Request) {
		r.Header.Set("Sec-Fetch-Site", "cross-site")
		r.URL.RawQuery = "ask=bans"
	}).Code)
}

// A breaker that opened before anybody looked is shown.
func TestBreaker(t *testing.T) {
	t.Parallel()

	page, server, _ := setup(t, livepage.Config{})
	observer := page.Observer()
	observer.Breaker(ratelimit.BreakerEvent{Limits: "durable", Open: true})
	observer.Breaker(ratelimit.BreakerEvent{Limits: "ephemeral", Shard: 2, Open: true})
	_, body, _ := get(t, server.URL)
	require.Contains(t, body, "open: durable; open: ephemeral, shard 2")
	observer.Breaker(ratelimit.BreakerEvent{Limits: "durable"})
	observer.Breaker(ratelimit.BreakerEvent{Limits: "ephemeral", Shard: 2})
	_, body, _ = get(t, server.URL)
	require.Contains(t, body, "<dt>Breaker</dt><dd>closed</dd>")
}

// What leases took is spent, returned or stranded, as soon as all leases are returned.
func TestLeases(t *testing.T) {
	t.Parallel()

	page, server, _ := setup(t, livepage.Config{})
	limiter := limitertest.New(t, pgtest.New(t).Pool, ratelimit.Config{
		Name: "<api>", Policy: ratelimit.FixedWindow{Limit: 1e9, Window: time.Hour}, Lease: &ratelimit.Lease{},
		OnFailure: ratelimit.ReturnError(),
	}, ratelimit.ClientConfig{Observer: page.Observer()})
	_, body, _ := get(t, server.URL)
	require.NotContains(t, body, "Units of leases")
	decide(t, limiter, "a", 50)
	require.NoError(t, limitertest.Client(limiter).ReturnLeases(t.Context()))
	_, body, _ = get(t, server.URL)
	_, leases, found := strings.Cut(body, "Units of leases")
	require.True(t, found)
	require.Contains(t, leases, "<bdi>&lt;api&gt;</bdi>")
	units := map[string]int{"spent": number(t, totals(body)["leased"])}
	for _, cell := range regexp.MustCompile(`data-label="(taken|returned|stranded)"[^>]*>(\d+)<`).FindAllStringSubmatch(leases, -1) {
		units[cell[1]] = number(t, cell[2])
	}
	require.Positive(t, units["taken"])
	require.Positive(t, units["returned"])
	require.Equal(t, units["taken"], units["spent"]+units["returned"]+units["stranded"], "%v", units)
}

func number(t *testing.T, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	require.NoError(t, err)
	return n
}

func TestAskTheDatabase(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	page, server, _ := setup(t, livepage.Config{DB: db.Pool, ShowKeys: true})
	for _, durable := range []bool{false, true} {
		name := map[bool]string{false: "login", true: "<durable>"}[durable]
		limiter := limitertest.New(t, db.Pool, ratelimit.Config{
			Name: name, Policy: ratelimit.FixedWindow{Limit: 5, Window: time.Hour}, Durable: durable,
			OnFailure: ratelimit.ReturnError(),
		})
		jobs := limitertest.New(t, db.Pool, ratelimit.Config{
			Name: name + " jobs", Policy: ratelimit.Concurrency{Limit: 2}, Durable: durable, OnFailure: ratelimit.ReturnError(),
		})
		page.AddLimiters(limiter, jobs)
		ask := func(question, name string) string {
			status, body, _ := get(t, server.URL+"?"+url.Values{"ask": {question}, "limiter": {name}}.Encode())
			require.Equal(t, http.StatusOK, status)
			return body
		}
		require.Contains(t, ask("fullest keys", name), "None.")
		decide(t, limiter, "<b>alice", 5)
		decide(t, limiter, "bob", 1)
		require.Regexp(t, `(?s)<bdi>&lt;b&gt;alice</bdi>.*data-label="left"><bdi>0</bdi>.*<bdi>bob</bdi>.*"left"><bdi>4</bdi>`,
			ask("fullest keys", name))

		require.Contains(t, ask("holds", name), "None.")
		hold, err := limiter.Hold(t.Context(), "bob", 3, time.Hour)
		require.NoError(t, err)
		require.True(t, hold.Allowed)
		require.Regexp(t, `<bdi>bob</bdi></th><td data-label="units"><bdi>3</bdi>`, ask("holds", name))

		require.Contains(t, ask("slots", name+" jobs"), "None.")
		slot, err := jobs.TryAcquire(t.Context(), "import", ratelimit.SlotOptions{N: 2, Holder: "worker-7", Group: "tenant:7"})
		require.NoError(t, err)
		require.True(t, slot.Allowed)
		slots := ask("slots", name+" jobs")
		require.Regexp(t, `(?s)<bdi>import</bdi>.*<bdi>held</bdi>.*<bdi>2</bdi>.*<bdi>worker-7</bdi>.*<bdi>tenant:7</bdi>`, slots)
		require.Contains(t, slots, "2 units are held in 1 slots, and 0 wait for 0.")
		require.Contains(t, ask("holds", name+" jobs"), "None.")
		require.NoError(t, slot.Slot.Release(t.Context()))

		require.Contains(t, ask("bans", name), "None.")
		pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, valid_until, comment)
			VALUES ($1, 'mallory', 'deny', now() + interval '1 hour', 'abuse')`, name)
		pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key_prefix, mode, comment) VALUES ($1, 'bot:', 'deny', 'bots')`, name)
		bans := ask("bans", name)
		require.Regexp(t, `(?s)bot: and all that begin like it</bdi>.*<bdi>never</bdi>.*<bdi>mallory</bdi>.*<bdi>(1h0m0s|59m\d+s)</bdi>`, bans)
		require.NotContains(t, bans, "<durable>")
	}

	// The problem names neither a key nor what the database says.
	pgtest.Exec(t, db.Pool, "ALTER TABLE rate_limit_policy RENAME TO gone")
	_, body, _ := get(t, server.URL+"?ask=bans&limiter=login")
	require.Contains(t, body, "The database has not answered: ")
	require.NotContains(t, body, "rate_limit_policy")
	_, body, _ = get(t, server.URL+"?ask=bans&limiter=nobody")
	require.Contains(t, body, "no such limiter")
}

// To count a decision allocates nothing, whether somebody looks or not.
func TestNoAllocation(t *testing.T) { //nolint:paralleltest // AllocsPerRun counts the allocations of all goroutines
	page := livepage.New(livepage.Config{})
	tell := all(page.Observer())
	require.Zero(t, testing.AllocsPerRun(1000, tell))
	request := httptest.NewRequest(http.MethodGet, "http://localhost/", nil)
	request.RemoteAddr = "127.0.0.1:5"
	page.ServeHTTP(httptest.NewRecorder(), request)
	require.Zero(t, testing.AllocsPerRun(1000, tell))
}

// all returns a function that tells the observer of an allowed and of a denied decision. The keys are ever others.
func all(o *ratelimit.Observer) func() {
	keys := make([]string, 1000)
	for i := range keys {
		keys[i] = "user:" + strings.Repeat("x", i%40) + string(rune('a'+i%26))
	}
	i := 0
	return func() {
		i++
		o.Decision(ratelimit.DecisionEvent{Limiter: "login", Cost: 1, Result: ratelimit.Result{Allowed: true}, Latency: 95 * time.Microsecond})
		o.Decision(ratelimit.DecisionEvent{Limiter: "login", Cost: 1, Latency: time.Microsecond})
		o.DeniedKey("login", keys[i%len(keys)])
		o.Statement(ratelimit.StatementEvent{Limiter: "login", Size: 3, Latency: time.Millisecond})
	}
}

func BenchmarkDecision(b *testing.B) {
	allowed := ratelimit.DecisionEvent{Limiter: "login", Cost: 1, Result: ratelimit.Result{Allowed: true}, Latency: 95 * time.Microsecond}
	denied := ratelimit.DecisionEvent{Limiter: "login", Cost: 1, Latency: time.Microsecond}
	for _, looking := range []bool{false, true} {
		page := livepage.New(livepage.Config{})
		o := page.Observer()
		name := "nobody looks/"
		if looking {
			name = "somebody looks/"
			request := httptest.NewRequest(http.MethodGet, "http://localhost/", nil)
			request.RemoteAddr = "127.0.0.1:5"
			page.ServeHTTP(httptest.NewRecorder(), request)
		}
		b.Run(name+"allowed", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				o.Decision(allowed)
			}
		})
		keys := make([]string, 1000)
		for i := range keys {
			keys[i] = "user:" + strings.Repeat("x", i/26) + string(rune('a'+i%26))
		}
		for kind, n := range map[string]int{"denied, the same key": 1, "denied, ever other keys": len(keys)} {
			b.Run(name+kind, func(b *testing.B) {
				b.ReportAllocs()
				i := 0
				for b.Loop() {
					i++
					o.Decision(denied)
					o.DeniedKey("login", keys[i%n])
				}
			})
		}
	}
}
