// Package demo shows the library at work in a small link shortener.
package demo

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/livepage"
	"github.com/pgratelimit/ratelimit/migrations"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

const (
	demoLimit    = 10 // requests per minute
	demoRequests = 15
	demoClient   = "127.0.0.1"

	orElse = "; unset DATABASE_URL, and the demo starts a Postgres of its own"

	setUpTimeout   = 20 * time.Second
	cleanUpTimeout = 10 * time.Second
	requestTimeout = 10 * time.Second
)

func Command(a *cli.App) *cobra.Command {
	var serve bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show on a small web server what a limit does",
		Long: `Puts a limit of 10 requests a minute in front of a small web server, and shows what happens to 15
requests, and why. The demo takes a few seconds.

The demo uses a new schema in the Postgres of --database-url or DATABASE_URL. If neither is given, the
demo starts a Postgres from the programs of this machine, with Docker, or from an npm package. At its
end, the demo removes everything that it has created.`,
		Example: `  pgratelimit demo
  pgratelimit demo --serve
  DATABASE_URL=postgres://me@localhost/app pgratelimit demo`,
		Args: cobra.NoArgs,
		RunE: cli.Action(func(ctx context.Context, _ []string) error {
			return Run(ctx, a.Stdout, a.DatabaseURL, serve)
		}),
	}
	cmd.Flags().BoolVar(&serve, "serve", false,
		"keep the web server running afterwards, to try it with curl, until Ctrl-C")
	return cmd
}

// Run runs the demo, and checks its output. If databaseURL is "", Run starts a Postgres. If serve is true, the web
// server runs until the context ends. Before Run returns, it removes everything that it has started or created.
func Run(ctx context.Context, out io.Writer, databaseURL string, serve bool) error {
	d := &demo{out: out}
	err := d.run(ctx, databaseURL, serve)
	if err != nil && ctx.Err() != nil {
		err = cli.ErrInterrupted
	}
	return errors.Join(err, d.close())
}

// demo is the state that the steps of the demo share.
type demo struct {
	out    io.Writer
	outErr error // the first error

	server *pgserver.Server
	pool   *pgxpool.Pool
	schema string // the demo's schema on a given server; "" on a server that the demo started

	limiter *ratelimit.Limiter
	page    *livepage.Page
	web     *http.Server
	webDone chan error
	baseURL string
}

func (d *demo) run(ctx context.Context, databaseURL string, serve bool) error {
	for _, step := range []func(context.Context) error{
		func(ctx context.Context) error { return d.openDatabase(ctx, databaseURL) },
		d.startWeb,
		d.sendRequests,
		d.showEdge,
		d.showRow,
	} {
		err := step(ctx)
		if err = cmp.Or(err, ctx.Err(), d.outErr); err != nil {
			return err
		}
	}
	if serve {
		return d.keepServing(ctx)
	}
	d.printf("\nWith --serve the demo would go on now, for you to try it with curl and psql.\n")
	return d.outErr
}

func (d *demo) printf(format string, args ...any) {
	if d.outErr == nil {
		_, d.outErr = fmt.Fprintf(d.out, format, args...)
	}
}

// openDatabase finds or starts a Postgres, and migrates it.
func (d *demo) openDatabase(ctx context.Context, databaseURL string) (err error) {
	d.printf("1. A Postgres to keep the limits in:\n")
	if d.server, err = pgserver.Start(ctx, pgserver.Config{URL: databaseURL}); err != nil {
		if databaseURL != "" {
			return fmt.Errorf("DATABASE_URL: %w%s", err, orElse)
		}
		return err
	}
	d.printf("   %s\n", d.server.Describe())

	config, err := pgxpool.ParseConfig(d.server.URL())
	if err != nil {
		return err
	}
	cli.NameSession(config.ConnConfig, "pgratelimit demo")
	if d.server.Owned() {
		d.printf("   It was started for this demo, and is gone when the demo ends.\n")
	} else {
		d.schema = "pgratelimit_demo_" + strings.ToLower(rand.Text()[:8])
		config.ConnConfig.RuntimeParams["search_path"] = d.schema
		d.printf("   The demo works in a schema of its own, %s, and drops it when it ends.\n", d.schema)
	}

	// Do not interrupt createSchema, or the server might create the schema after close has looked for it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), setUpTimeout)
	defer cancel()
	if d.pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	if err := d.createSchema(ctx); err != nil {
		return fmt.Errorf("make a schema in the database of DATABASE_URL: %w%s", err, orElse)
	}
	return migrations.Up(ctx, d.pool)
}

// createSchema creates a schema for the demo on a given server, and checks that search_path names this schema first.
func (d *demo) createSchema(ctx context.Context) error {
	if d.schema == "" {
		return nil
	}
	if _, err := d.pool.Exec(ctx, "CREATE SCHEMA "+d.schema); err != nil {
		return err
	}
	var current string
	if err := d.pool.QueryRow(ctx, "SELECT coalesce(current_schema(), '')").Scan(&current); err != nil {
		return err
	}
	if current != d.schema {
		return errors.New("something between here and Postgres, perhaps a pooler, " +
			"drops search_path; connect to Postgres itself")
	}
	return nil
}

// newLimiter returns a limiter. The argument now is nil, or a clock that the demo sets by hand.
func (d *demo) newLimiter(name string, policy ratelimit.Policy, now func() time.Time) (*ratelimit.Limiter, error) {
	config := ratelimit.ClientConfig{
		Logger: slog.New(slog.DiscardHandler), // the demo itself prints errors
		Test:   ratelimit.TestConfig{Now: now},
	}
	if now == nil { // the page shows only limiters that run by the real clock
		config.Observer = d.page.Observer()
	}
	client, err := ratelimit.NewClient(d.pool, config)
	if err != nil {
		return nil, err
	}
	return client.Limiter(ratelimit.Config{Name: name, Policy: policy, OnFailure: ratelimit.ReturnError()})
}

// startWeb starts the application on a free port.
func (d *demo) startWeb(context.Context) (err error) {
	d.page = livepage.New(livepage.Config{DB: d.pool, ShowKeys: true}) // the keys are the demo's
	policy := ratelimit.SlidingWindow{Limit: demoLimit, Window: time.Minute}
	if d.limiter, err = d.newLimiter("shorten", policy, nil); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", demoClient+":0")
	if err != nil {
		return err
	}
	d.baseURL = "http://" + listener.Addr().String()
	handler, err := d.handler()
	if err != nil {
		listener.Close()
		return err
	}
	d.web = &http.Server{Handler: handler, ReadHeaderTimeout: requestTimeout}
	d.web.RegisterOnShutdown(d.page.Close)
	d.webDone = make(chan error, 1)
	go func() { d.webDone <- d.web.Serve(listener) }()

	d.printf("\n2. A web server, where POST %s/shorten makes a short link.\n", d.baseURL)
	d.printf("   Each client address may do that %d times a minute.\n", demoLimit)
	return nil
}

// handler returns the application with its pages.
func (d *demo) handler() (http.Handler, error) {
	shortener, err := newShortener(d.baseURL, d.limiter)
	if err != nil {
		return nil, err
	}
	windows, err := newPicture(func(name string, policy ratelimit.Policy) (*ratelimit.Limiter, error) {
		return d.newLimiter(name, policy, nil)
	})
	if err != nil {
		return nil, err
	}
	d.page.AddLimiters(d.limiter, windows.windows[0].limiter, windows.windows[1].limiter)
	mux := http.NewServeMux()
	mux.Handle("/", shortener)
	mux.Handle("/debug/ratelimit", d.page)
	windows.addTo(mux)
	return mux, nil
}

// sendRequests sends more requests than the limit allows.
func (d *demo) sendRequests(ctx context.Context) error {
	d.printf("\n3. %d requests from %s: %d are allowed, the others are told how long to wait.\n\n",
		demoRequests, demoClient, demoLimit)

	client := &http.Client{Transport: &http.Transport{}, Timeout: requestTimeout} // do not use a proxy
	defer client.CloseIdleConnections()
	for i := 1; i <= demoRequests; i++ {
		answer, err := post(ctx, client, d.baseURL+"/shorten")
		if err != nil {
			return err
		}
		d.printf("%2d  %-21s  remaining %s", i, answer.status, answer.remaining)
		if answer.retryAfter != "" {
			d.printf("  Retry-After %ss", answer.retryAfter)
		}
		d.printf("\n")
		if err := answer.check(i); err != nil {
			return fmt.Errorf("request %d was answered wrongly: %w", i, err)
		}
	}

	d.printf(`
   Why longer than a minute? A sliding window does not forget all at once: what was
   taken in one minute fades away evenly in the next. After 60 s + 6 s there is room
   for one request again.
`)
	return nil
}

// answer is the application's response to a request.
type answer struct{ status, remaining, retryAfter string }

func post(ctx context.Context, client *http.Client, shortenURL string) (answer, error) {
	form := url.Values{"url": {"https://www.postgresql.org/docs/"}}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, shortenURL, strings.NewReader(form.Encode()))
	if err != nil {
		return answer{}, err
	}
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	response, err := client.Do(request)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil { // an unread body prevents the reuse of the connection
		return answer{}, err
	}
	return answer{
		status:     response.Status,
		remaining:  response.Header.Get("X-RateLimit-Remaining"),
		retryAfter: response.Header.Get("Retry-After"),
	}, nil
}

// check returns an error if a is the wrong answer to request number i. The first request has number 1.
func (a answer) check(i int) error {
	status, remaining := "201 Created", demoLimit-i
	if i > demoLimit {
		status, remaining = "429 Too Many Requests", 0
	}
	if a.status != status || a.remaining != strconv.Itoa(remaining) {
		return fmt.Errorf("expected %s, remaining %d", status, remaining)
	}
	if i <= demoLimit {
		return nil
	}
	if seconds, err := strconv.Atoi(a.retryAfter); err != nil || seconds < 1 || seconds > 66 {
		return errors.New("expected a Retry-After from 1 to 66 s")
	}
	return nil
}

// showEdge sends the same requests to a fixed and to a sliding window, both before and after the fixed window ends.
func (d *demo) showEdge(ctx context.Context) error {
	noon := time.Date(2026, time.January, 1, 12, 0, 0, 0, time.UTC)
	now := noon
	clock := func() time.Time { return now }
	fixed, err := d.newLimiter("edge-fixed", ratelimit.FixedWindow{Limit: demoLimit, Window: time.Minute}, clock)
	if err != nil {
		return err
	}
	sliding, err := d.newLimiter("edge-sliding", ratelimit.SlidingWindow{Limit: demoLimit, Window: time.Minute}, clock)
	if err != nil {
		return err
	}

	d.printf("\n4. The same requests against a fixed window and a sliding one, both of %d a minute,\n"+
		"   with a clock that is set by hand: how many does each allow?\n\n", demoLimit)
	const line = "   %-8s  %8v  %12v  %14v\n"
	d.printf(line, "time", "requests", "fixed window", "sliding window")
	var asked, byFixed, bySliding int
	for _, step := range []struct {
		at       time.Duration
		requests int
	}{
		{0, 1}, // the first request starts the fixed window
		{59 * time.Second, demoLimit - 1},
		{60 * time.Second, demoLimit},
	} {
		now = noon.Add(step.at)
		f, err := countAllowed(ctx, fixed, step.requests)
		if err != nil {
			return err
		}
		s, err := countAllowed(ctx, sliding, step.requests)
		if err != nil {
			return err
		}
		d.printf(line, now.Format(time.TimeOnly), step.requests, f, s)
		asked, byFixed, bySliding = asked+step.requests, byFixed+f, bySliding+s
	}
	d.printf(line, "total", asked, byFixed, bySliding)
	if byFixed != 2*demoLimit || bySliding != demoLimit {
		return fmt.Errorf("expected the fixed window to allow %d and the sliding window %d", 2*demoLimit, demoLimit)
	}

	d.printf(`
   The fixed window starts at its first request and forgets everything a minute later,
   so 19 requests pass within a second. In the sliding one the ten before still count.
`)
	return nil
}

// countAllowed returns how many of n requests a limiter allows.
func countAllowed(ctx context.Context, limiter *ratelimit.Limiter, n int) (allowed int, err error) {
	for range n {
		result, err := limiter.Allow(ctx, demoClient)
		if err != nil {
			return 0, err
		}
		if result.Allowed {
			allowed++
		}
	}
	return allowed, nil
}

// showRow shows the row of the client in the table, and how to use the same limit in SQL.
func (d *demo) showRow(ctx context.Context) error {
	inSchema := ""
	if d.schema != "" {
		inSchema = d.schema + "."
	}
	look := `SELECT prefix, key, algorithm, count, prev_count,
       to_timestamp(window_start / 1e6) AS window_start,
       to_timestamp(expires_at / 1e6) AS expires_at
FROM ` + inSchema + `rate_limit_ephemeral WHERE prefix = 'shorten'`
	take := fmt.Sprintf("SELECT * FROM %srate_limit_allow('shorten', '%s', 'sliding %d/1m')",
		inSchema, demoClient, demoLimit)

	record, err := queryRecord(ctx, d.pool, look)
	if err != nil {
		return err
	}
	d.printf("\n5. All that Postgres keeps of it is one row for each address. In psql:\n\n%s \\gx\n\n%s", look, record)
	if count := record.value("count"); count != strconv.Itoa(demoLimit) {
		return fmt.Errorf("the row counts %s requests, expected %d", count, demoLimit)
	}
	d.printf("\n   Algorithm 2 is the sliding window. The count is %d: denied requests take nothing,\n"+
		"   and write no row.\n", demoLimit)

	if record, err = queryRecord(ctx, d.pool, take); err != nil {
		return err
	}
	if allowed := record.value("allowed"); allowed != "f" {
		return fmt.Errorf("SQL was told allowed = %s, expected f", allowed)
	}
	d.printf("   Whatever speaks SQL can take from the same limit:\n\n%s;\n\n", take)
	d.printf("   Right now it answers allowed = f and retry_after = %s.\n", record.value("retry_after"))
	return nil
}

// keepServing keeps the web server running until the context ends.
func (d *demo) keepServing(ctx context.Context) error {
	if err := d.limiter.Reset(ctx, demoClient); err != nil {
		return err
	}
	database := `"$DATABASE_URL"`
	if d.server.Owned() {
		database = "'" + d.server.URL() + "'"
	}
	d.printf("\n6. The limit has been reset, and the web server goes on until Ctrl-C. Try these in\n" +
		"   another terminal:\n\n")
	d.printf("curl -i -d url=https://www.postgresql.org/docs/ %s/shorten\n", d.baseURL)
	d.printf("psql %s\n", database)
	d.printf("\n   Or open these in a browser: two windows, and what this process decides.\n\n")
	d.printf("%s/\n%s/debug/ratelimit\n", d.baseURL, d.baseURL)
	if d.outErr != nil {
		return d.outErr
	}

	select {
	case <-ctx.Done():
		return nil
	case err := <-d.webDone:
		return err
	}
}

// close ends and removes everything that the demo has started or created.
func (d *demo) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanUpTimeout)
	defer cancel()

	if d.web != nil {
		d.stopWeb(ctx)
	}
	var err error
	if d.pool != nil {
		err = d.dropSchema(ctx)
		d.pool.Close()
	}
	if d.server != nil {
		err = errors.Join(err, d.server.Close())
	}
	if err != nil || d.pool == nil {
		return err
	}
	if d.server.Owned() {
		d.printf("\nPostgres is stopped and removed.\n")
	} else {
		d.printf("\nThe schema %s is gone.\n", d.schema)
	}
	return nil
}

func (d *demo) stopWeb(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if err := d.web.Shutdown(ctx); err != nil {
		_ = d.web.Close() // a client may be slow to send or read
	}
}

func (d *demo) dropSchema(ctx context.Context) error {
	if d.schema == "" {
		return nil
	}
	if _, err := d.pool.Exec(ctx, "DROP SCHEMA IF EXISTS "+d.schema+" CASCADE"); err != nil {
		return fmt.Errorf("the schema is left behind, remove it with DROP SCHEMA %s CASCADE: %w", d.schema, err)
	}
	return nil
}

// record is a row with all values as text, as psql gets them.
type record []struct{ column, value string }

// queryRecord returns the only row of a query.
func queryRecord(ctx context.Context, pool *pgxpool.Pool, sql string) (record, error) {
	rows, err := pool.Query(ctx, sql, pgx.QueryExecModeSimpleProtocol) // in the simple protocol, all values are text
	if err != nil {
		return nil, err
	}
	return pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (record, error) {
		fields := row.FieldDescriptions()
		record := make(record, len(fields))
		for i, value := range row.RawValues() {
			record[i].column, record[i].value = fields[i].Name, string(value)
		}
		return record, nil
	})
}

func (r record) value(column string) string {
	for _, field := range r {
		if field.column == column {
			return field.value
		}
	}
	return ""
}

// String formats the row like psql after \gx.
func (r record) String() string {
	var columns, values int
	for _, field := range r {
		columns, values = max(columns, len(field.column)), max(values, len(field.value))
	}
	var text strings.Builder
	header := []byte(strings.Repeat("-", columns+1) + "+" + strings.Repeat("-", values+1))
	copy(header, "-[ RECORD 1 ]")
	fmt.Fprintf(&text, "%s\n", header)
	for _, field := range r {
		fmt.Fprintf(&text, "%-*s | %s\n", columns, field.column, field.value)
	}
	return text.String()
}
