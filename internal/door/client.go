package door

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/wire"
)

// Client is a process's connection to a service. It connects at the first call, and again when the connection is lost.
// All engines of the process can share a Client.
//
// A call that was not sent fails with pg.ErrUnavailable, or goes to ClientConfig.Direct. A call that was sent and has
// no answer fails with pg.ErrOutcomeUnknown too.
type Client struct {
	config ClientConfig
	pause  time.Duration // after a failed attempt to connect
	quiet  time.Duration // how long a service may be silent that owes an answer, before it is asked for a sign

	mu         sync.Mutex
	link       *link          // for new calls; nil without a connection
	links      map[*link]bool // all open ones: a service that leaves still owes answers on an old one
	waiting    []*call        // for a connection
	connecting bool
	failure    error     // why the last attempt to connect failed, or nil
	failedAt   time.Time // when that was
	timer      *time.Timer
	due        time.Time // when the timer fires; zero if it is not set
	closed     bool
}

// ClientConfig says how to reach a service.
type ClientConfig struct {
	Address string // host:port, or unix:/path
	TLS     *tls.Config
	Token   string
	Direct  pg.DB // asked while the service is away; may be nil
}

// call is a request or a statement.
type call struct {
	request   *engine.Request
	statement *statement
	deadline  time.Time
	at        time.Time // when it was put into the outbox
	err       error
	unsent    bool
}

// statement is a statement under way.
type statement struct {
	payload []byte
	done    chan struct{}
	fields  []pgconn.FieldDescription
	rows    [][][]byte
	size    int
	call    *call
}

// link is a connection whose service has sent a welcome.
type link struct {
	outbox

	client  *Client
	calls   map[uint64]*call
	next    uint64    // the id of the next call
	sentTo  uint64    // ids below it were sent, at least in part
	heardAt time.Time // when the service last sent something
	askedAt time.Time // when it was asked for a sign; zero if it was not, or has given one
	leaving bool
	ears    map[*ear]bool
	listens bool // the service listens for them
}

// maxWaiting is how many bytes may wait until they are sent. Callers may time out faster than a frozen service reads.
const maxWaiting = 4 << 20

// maxRows is how many bytes the rows of a statement may have.
const maxRows = 256 << 20

var (
	errClosed  = errors.New("the connection to the service was closed by this process")
	errFull    = errors.New("the service does not read what is sent")
	errLost    = errors.New("the connection to the service was lost")
	errSilent  = errors.New("the service does not answer")
	errNoReply = errors.New("the service has not answered in time")
	errNoLink  = errors.New("there was no connection to the service in time")
)

// NewClient returns a client. It does not connect yet.
func NewClient(config ClientConfig) *Client {
	return &Client{
		config: config, pause: 100 * time.Millisecond, quiet: 500 * time.Millisecond,
		links: map[*link]bool{},
	}
}

// Direct returns the database to ask while the service is away, or nil.
func (c *Client) Direct() pg.DB { return c.config.Direct }

// Close closes the connection. Calls under way fail, and so do all later ones.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	ended := c.endWaiting(errClosed)
	for l := range c.links {
		ended = append(ended, l.drop(errClosed)...)
	}
	if c.timer != nil {
		c.timer.Stop()
	}
	c.mu.Unlock()
	end(ended)
}

// Send sends a request to the service. See engine.Door.
func (c *Client) Send(r *engine.Request, deadline time.Time) {
	c.send(&call{request: r, deadline: deadline})
}

// Query sends one of the library's statements to the service.
func (c *Client) Query(ctx context.Context, sql string, arguments ...any) (pgx.Rows, error) {
	if err := ctx.Err(); err != nil {
		return nil, pg.Translate(err, false)
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(statementTime)
	}
	payload, err := appendArguments(wire.AppendText(wire.AppendInt(nil, int64(time.Until(deadline))), sql), arguments)
	if err == nil && len(payload) > MaxFrame-16 {
		err = serviceError(errTooLarge, pg.ErrSetup)
	}
	if err != nil {
		return nil, err
	}
	s := &statement{payload: payload, done: make(chan struct{})}
	s.call = &call{statement: s, deadline: deadline}
	c.send(s.call)
	select {
	case <-s.done:
	case <-ctx.Done():
		return nil, pg.Translate(ctx.Err(), true) // the call ends at its deadline
	}
	switch {
	case s.call.err == nil:
		return &rows{fields: s.fields, rows: s.rows, types: pgtype.NewMap()}, nil
	case s.call.unsent && c.config.Direct != nil:
		return c.config.Direct.Query(ctx, sql, arguments...)
	}
	return nil, s.call.err
}

// send sends a call, or keeps it until there is a connection.
func (c *Client) send(one *call) {
	c.mu.Lock()
	err := c.put(one)
	c.watch(one.deadline)
	c.mu.Unlock()
	if err != nil {
		one.fail(err, true)
		end([]*call{one})
	}
}

// put gives a call to the connection, or keeps it until there is one. It returns an error if there will be none soon.
// The caller holds c.mu.
func (c *Client) put(one *call) error {
	switch {
	case c.closed:
		return serviceError(errClosed, pg.ErrSetup)
	case c.link != nil:
		return c.link.put(one)
	}
	again := c.failure != nil
	if again && !c.connecting && time.Since(c.failedAt) < c.pause {
		return c.failure
	}
	if !c.connecting {
		c.connecting = true
		go c.connect()
	}
	if again && c.config.Direct != nil { // it need not wait for this attempt
		return c.failure
	}
	c.waiting = append(c.waiting, one)
	return nil
}

// put puts a call into the outbox. The caller holds c.mu.
func (l *link) put(one *call) error {
	if len(l.waiting) > maxWaiting {
		return serviceError(errFull, pg.ErrUnavailable)
	}
	id, start := l.next, len(l.waiting)
	if one.request != nil {
		l.waiting = one.request.AppendMessage(beginFrame(l.waiting, frameRequest, id))
	} else {
		l.waiting = append(beginFrame(l.waiting, frameStatement, id), one.statement.payload...)
	}
	if len(l.waiting)-start > MaxFrame {
		l.waiting = l.waiting[:start]
		return serviceError(errTooLarge, pg.ErrSetup)
	}
	l.waiting = endFrame(l.waiting, start)
	l.next++
	one.at = time.Now()
	l.calls[id] = one
	l.start()
	return nil
}

// fail ends a call with an error. If unsent is true, the service does not know the call.
func (one *call) fail(err error, unsent bool) {
	one.err, one.unsent = err, unsent
	if one.request != nil {
		one.request.Fail(err, unsent)
	}
}

// end gives the callers of calls their answers. The caller does not hold c.mu.
func end(calls []*call) {
	var requests []*engine.Request
	for _, one := range calls {
		if one.request != nil {
			requests = append(requests, one.request)
		} else {
			close(one.statement.done)
		}
	}
	engine.EndTrips(requests)
}

// endWaiting ends the calls that wait for a connection. The caller holds c.mu.
func (c *Client) endWaiting(err error) []*call {
	ended := c.waiting
	c.waiting = nil
	for _, one := range ended {
		one.fail(unavailable(err), true)
	}
	return ended
}

// unavailable returns the error of a call that was not sent.
func unavailable(err error) error { return pg.Translate(err, false).InOwnWords() }

// serviceError returns an error about the service, or about the connection to it.
func serviceError(err error, kinds ...error) error { return pg.NewError(err, kinds...).InOwnWords() }

// connect makes a connection, and gives it the calls that wait.
func (c *Client) connect() {
	conn, in, err := c.dial()
	c.mu.Lock()
	c.connecting = false
	if err == nil && c.closed {
		_ = conn.Close()
		err = errClosed
	}
	var ended []*call
	if err != nil {
		c.failure, c.failedAt = unavailable(fmt.Errorf("the service cannot be reached: %w", err)), time.Now()
		if known, ok := errors.AsType[*pg.Error](err); ok {
			c.failure = known
		}
		ended = c.endWaiting(c.failure)
	} else {
		c.failure = nil
		l := &link{client: c, calls: map[uint64]*call{}, ears: map[*ear]bool{}, next: 1, sentTo: 1, heardAt: time.Now()}
		l.outbox = outbox{
			conn: conn, mu: &c.mu, sending: func() { l.sentTo = l.next }, sent: func() {}, failed: l.stuck,
		}
		c.link, c.links[l] = l, true
		waiting := c.waiting
		c.waiting = nil
		for _, one := range waiting {
			if err := l.put(one); err != nil {
				one.fail(err, true)
				ended = append(ended, one)
			}
		}
		go l.read(in)
	}
	c.mu.Unlock()
	end(ended)
}

// dial opens a connection, and waits for the welcome.
func (c *Client) dial() (net.Conn, *frames, error) {
	ctx, cancel := context.WithTimeout(context.Background(), dialTime)
	defer cancel()
	var dialer net.Dialer
	network, address := Network(c.config.Address)
	conn, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, nil, err
	}
	if c.config.TLS != nil {
		secure := tls.Client(conn, serverName(c.config.TLS, address))
		if err := secure.HandshakeContext(ctx); err != nil {
			_ = conn.Close()
			return nil, nil, err
		}
		conn = secure
	}
	in, err := c.greet(conn)
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	return conn, in, nil
}

// dialTime is how long an attempt to connect may take.
const dialTime = 2 * time.Second

// serverName returns a configuration with the name that the service's certificate must have.
func serverName(config *tls.Config, address string) *tls.Config {
	host, _, err := net.SplitHostPort(address)
	if config.ServerName != "" || err != nil {
		return config
	}
	config = config.Clone()
	config.ServerName = host
	return config
}

// greet sends the hello, and reads the welcome.
func (c *Client) greet(conn net.Conn) (*frames, error) {
	_ = conn.SetDeadline(time.Now().Add(dialTime))
	hello := wire.AppendText(wire.AppendInt(wire.AppendText(nil, protocol), version), c.config.Token)
	_, refused := conn.Write(appendFrame(nil, frameHello, 0, hello))
	in := newFrames(conn)
	f, err := in.next() // a service that has too many connections says so, and reads nothing
	switch {
	case err != nil && refused != nil:
		return nil, refused
	case errors.Is(err, errFrame):
		return nil, serviceError(err, pg.ErrSetup)
	case err != nil && c.config.TLS == nil:
		return nil, fmt.Errorf("it ended the connection before its welcome; perhaps it wants TLS: %w", err)
	case err != nil:
		return nil, err
	case f.kind == frameRefusal:
		return nil, unavailable(readError(f.message, 0))
	case f.kind != frameWelcome || f.message.Int() != version:
		return nil, serviceError(errFrame, pg.ErrSetup)
	}
	in.most = MaxFrame
	return in, conn.SetDeadline(time.Time{})
}

// read reads what the service sends, until the connection ends.
func (l *link) read(in *frames) {
	var done []*call
	for {
		if !in.ready() {
			end(done)
			done = done[:0]
			if l.isOver() {
				l.lose(errClosed)
				return
			}
			if err := in.begin(); err != nil {
				l.lose(err)
				return
			}
			l.client.mu.Lock()
			l.heardAt, l.askedAt = time.Now(), time.Time{}
			l.client.mu.Unlock()
		}
		f, err := in.next()
		if err != nil {
			end(done)
			l.lose(err)
			return
		}
		if one := l.handle(f); one != nil {
			done = append(done, one)
		}
	}
}

// isOver returns whether the service leaves, and owes no more answers to this process.
func (l *link) isOver() bool {
	c := l.client
	c.mu.Lock()
	defer c.mu.Unlock()
	return l.leaving && c.link != l && len(l.calls) == 0
}

// handle handles a frame, and returns the call that has ended by it, or nil.
func (l *link) handle(f frame) *call {
	c, m := l.client, f.message
	switch f.kind {
	case frameLeaving:
		l.leave()
		return nil
	case frameLast:
		l.sendAgain(f.id)
		return nil
	case frameListens, frameSlot:
		l.hear(f)
		return nil
	case frameAnswer, frameError, frameFields, frameRows, frameEnd:
	default: // a pong, or what a later version sends
		return nil
	}
	c.mu.Lock()
	one := l.calls[f.id]
	if one != nil && f.kind != frameFields && f.kind != frameRows {
		delete(l.calls, f.id)
	}
	c.mu.Unlock()
	if one == nil { // its time is over
		return nil
	}
	s := one.statement
	switch {
	case f.kind == frameError:
		err := readError(m, 0)
		if m.Bad() {
			err = serviceError(errFrame, pg.ErrSetup, pg.ErrOutcomeUnknown)
		}
		one.fail(err, false)
	case one.request != nil:
		one.request.Arrive(m)
	case f.kind == frameFields:
		s.fields = readFields(m)
		return nil
	case f.kind == frameRows:
		s.read(wire.Read(append([]byte(nil), m.Rest()...)))
		return nil
	case f.kind != frameEnd:
		one.fail(serviceError(errFrame, pg.ErrSetup, pg.ErrOutcomeUnknown), false)
	case s.size > maxRows:
		one.fail(serviceError(errors.New("there are too many rows"), pg.ErrSetup), false)
	}
	return one
}

// read reads rows of a statement.
func (s *statement) read(m *wire.Reader) {
	if s.size += len(m.Rest()); s.size > maxRows || len(s.fields) == 0 {
		s.rows = nil
		return
	}
	for len(m.Rest()) > 0 {
		s.rows = append(s.rows, readRow(m, len(s.fields)))
	}
}

// drop closes a connection, and ends its calls. The caller holds c.mu.
func (l *link) drop(err error) (ended []*call) {
	c := l.client
	if !c.links[l] {
		return nil
	}
	delete(c.links, l)
	if c.link == l {
		c.link = nil
	}
	l.ended, l.waiting = true, nil
	l.deafen()
	_ = l.conn.Close()
	for id, one := range l.calls {
		if id >= l.sentTo {
			one.fail(serviceError(fmt.Errorf("%w: %w", errLost, err), pg.ErrUnavailable), true)
		} else {
			one.fail(serviceError(fmt.Errorf("%w: %w", errLost, err), pg.ErrUnavailable, pg.ErrOutcomeUnknown), false)
		}
		ended = append(ended, one)
	}
	l.calls = nil
	return ended
}

// lose ends a connection that was lost.
func (l *link) lose(err error) {
	l.client.mu.Lock()
	ended := l.drop(err)
	l.client.mu.Unlock()
	end(ended)
}

// stuck handles that nothing more can be sent. The service may have said before what it has read, so the reader goes on
// for a moment.
func (l *link) stuck(err error) {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		l.lose(err)
		return
	}
	c := l.client
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link == l {
		c.link = nil
	}
	_ = l.conn.SetReadDeadline(time.Now().Add(lastWords))
}

// lastWords is how long a connection is read from which cannot be written to.
const lastWords = 100 * time.Millisecond

// leave looks for another connection, because the service is leaving. Until there is one, calls still use this one.
func (l *link) leave() {
	c := l.client
	c.mu.Lock()
	defer c.mu.Unlock()
	l.leaving = true
	if c.link == l && !c.connecting && !c.closed {
		c.connecting = true
		go c.moveFrom(l)
	}
}

// moveFrom connects again until it succeeds, or until the connection of a service that leaves has ended.
func (c *Client) moveFrom(l *link) {
	for {
		c.connect()
		c.mu.Lock()
		stay := c.link == l && !c.closed
		c.connecting = c.connecting || stay
		over := !stay && len(l.calls) == 0
		c.mu.Unlock()
		if over { // the reader waits for a frame that will not come
			l.lose(errClosed)
		}
		if !stay {
			return
		}
		time.Sleep(c.pause)
	}
}

// sendAgain sends the calls again that a service which leaves has not read. The argument last is the last id that it
// has read.
func (l *link) sendAgain(last uint64) {
	c := l.client
	var unsent []*call
	c.mu.Lock()
	l.leaving = true
	if c.link == l {
		c.link = nil
	}
	for id, one := range l.calls {
		if id > last {
			delete(l.calls, id)
			unsent = append(unsent, one)
		}
	}
	c.mu.Unlock()
	for _, one := range unsent {
		c.send(one)
	}
}

// watch makes the timer fire no later than at a deadline. The caller holds c.mu.
func (c *Client) watch(deadline time.Time) {
	if c.closed || !c.due.IsZero() && !deadline.Before(c.due) {
		return
	}
	c.due = deadline
	wait := max(time.Until(deadline), 0)
	if c.timer == nil {
		c.timer = time.AfterFunc(wait, c.expire)
	} else {
		c.timer.Reset(wait)
	}
}

// expire ends the calls whose time is over, and the connection of a service that gives no sign. Many calls share the
// timer, because their deadlines come in the order of the calls.
func (c *Client) expire() {
	c.mu.Lock()
	now := time.Now()
	c.due = time.Time{}
	var ended []*call
	var next time.Time
	soonest := func(t time.Time) {
		if next.IsZero() || t.Before(next) {
			next = t
		}
	}
	rest := c.waiting[:0]
	for _, one := range c.waiting {
		if now.Before(one.deadline) {
			rest = append(rest, one)
			soonest(one.deadline)
			continue
		}
		one.fail(serviceError(errNoLink, pg.ErrUnavailable, pg.ErrTimeout), true)
		ended = append(ended, one)
	}
	clear(c.waiting[len(rest):])
	c.waiting = rest
	for l := range c.links {
		owes := false
		for id, one := range l.calls {
			if now.Before(one.deadline) {
				soonest(one.deadline)
				continue
			}
			delete(l.calls, id)
			owes = owes || one.at.After(l.heardAt)
			if id < l.sentTo {
				one.fail(serviceError(errNoReply, pg.ErrTimeout, pg.ErrOutcomeUnknown), false)
			} else {
				one.fail(serviceError(errNoReply, pg.ErrTimeout), false)
			}
			ended = append(ended, one)
		}
		switch {
		case !l.askedAt.IsZero() && now.Sub(l.askedAt) >= c.quiet:
			ended = append(ended, l.drop(errSilent)...)
		case !l.askedAt.IsZero():
			soonest(l.askedAt.Add(c.quiet))
		case owes:
			l.askedAt = now
			l.waiting = appendFrame(l.waiting, framePing, 0, nil)
			l.start()
			soonest(now.Add(c.quiet))
		}
	}
	if !next.IsZero() {
		c.watch(next)
	}
	c.mu.Unlock()
	end(ended)
}
