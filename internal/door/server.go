package door

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/wire"
)

// Options say how a service serves. The zero value is useful, but for Valid.
type Options struct {
	Valid    func(algorithm.Numbers) bool // whether a policy may have these numbers
	Token    string                       // what clients must say; "" lets all in
	Logger   *slog.Logger                 // nil means slog.Default
	MaxConns int                          // defaults to 10,000
	Grace    time.Duration                // how long clients have to leave; defaults to 5 seconds
}

// maxUnderWay is how many requests of a connection may be under way. Further ones stay unread until others are
// answered.
const maxUnderWay = 1024

// statementTime bounds the time of a statement.
const statementTime = 30 * time.Second

var (
	errToken     = errors.New("the service refuses the token")
	errVersion   = errors.New("the service speaks another version of the protocol; upgrade the older of both")
	errTooMany   = errors.New("the service has too many connections")
	errMessage   = errors.New("the service refuses a request that this library would not have sent")
	errStatement = errors.New("the service runs no statements but the limiter's own")
)

// server is a service that listens.
type server struct {
	engine     *engine.Engine
	options    Options
	spaces     engine.Spaces
	statements map[string]string // by the text that clients send, the text with the schema
	token      [sha256.Size]byte

	mu       sync.Mutex
	peers    map[*peer]bool
	leaving  bool
	gone     sync.WaitGroup
	loggedAt time.Time // when a refusal was last logged
	unlogged int       // how many were not logged since
	ears     ears
}

// Serve answers the clients that connect to a listener, by an engine with a pool. It returns when ctx has ended and all
// that was under way is answered. It closes the listener.
func Serve(ctx context.Context, listener net.Listener, e *engine.Engine, options Options) error {
	options.MaxConns = cmp.Or(options.MaxConns, 10_000)
	options.Grace = cmp.Or(options.Grace, 5*time.Second)
	s := &server{
		engine: e, options: options, token: sha256.Sum256([]byte(options.Token)),
		peers: map[*peer]bool{}, statements: map[string]string{},
	}
	for _, text := range append(engine.Statements(), policytable.Statements()...) {
		ours := pg.Qualify(text, e.Settings.Schema)
		s.statements[text], s.statements[ours] = ours, ours
	}
	stop := context.AfterFunc(ctx, func() { _ = listener.Close() })
	defer stop()
	err := s.accept(ctx, listener)
	s.drain()
	return err
}

// accept accepts connections until ctx ends.
func (s *server) accept(ctx context.Context, listener net.Listener) error {
	for {
		conn, err := listener.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = conn.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return err
		case err != nil: // such as too many open files
			s.log(err)
			sleep(ctx, 50*time.Millisecond)
			continue
		}
		p := &peer{server: s, intake: s.engine.NewIntake(&s.spaces, s.options.Valid)}
		p.room = sync.NewCond(&p.mu)
		p.outbox = outbox{conn: conn, mu: &p.mu, sending: p.sends, sent: p.wrote, failed: p.fail}
		s.mu.Lock()
		full := len(s.peers) >= s.options.MaxConns
		if !full {
			s.peers[p] = true
			s.gone.Add(1)
		}
		s.mu.Unlock()
		if full {
			s.log(errTooMany)
			go func() {
				p.refuse(errTooMany, pg.ErrUnavailable)
				_ = conn.Close()
			}()
			continue
		}
		go p.serve()
	}
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// drain tells all clients that the service is leaving, gives them time to go, and then reads no more.
func (s *server) drain() {
	s.mu.Lock()
	s.leaving = true
	for p := range s.peers {
		p.tell(frameLeaving, 0, nil)
	}
	s.mu.Unlock()
	gone := make(chan struct{})
	go func() {
		s.gone.Wait()
		close(gone)
	}()
	select {
	case <-gone:
		return
	case <-time.After(s.options.Grace):
	}
	s.mu.Lock()
	for p := range s.peers {
		p.stopReading()
	}
	s.mu.Unlock()
	<-gone
}

// log logs why a connection was refused or ended, but no more than a line each second.
func (s *server) log(err error) {
	s.mu.Lock()
	now := time.Now()
	quiet := now.Sub(s.loggedAt) < time.Second
	more := s.unlogged
	if quiet {
		s.unlogged++
	} else {
		s.loggedAt, s.unlogged = now, 0
	}
	s.mu.Unlock()
	if !quiet {
		cmp.Or(s.options.Logger, slog.Default()).Warn("ratelimit: a process was refused by the service",
			"error", err, "not_logged", more)
	}
}

// peer is a connection of a client.
type peer struct {
	outbox

	server   *server
	intake   *engine.Intake
	mu       sync.Mutex
	room     *sync.Cond // signaled when underWay shrinks, and at the end
	underWay int        // requests and statements whose answers are not sent yet
	answers  int        // answers in the outbox
	inFlight int        // answers that are being sent
	welcome  bool
	stopped  bool   // no more is read
	last     uint64 // the last id that was read
}

// serve reads what a client sends, until the connection ends.
func (p *peer) serve() {
	s := p.server
	err := p.read()
	p.mu.Lock()
	if p.stopped { // the client is still there, and gets its answers
		p.waiting = appendFrame(p.waiting, frameLast, p.last, nil)
		p.start()
		for !p.ended && (p.underWay > 0 || p.writing || len(p.waiting) > 0) {
			p.room.Wait()
		}
		err = nil
	}
	p.ended, p.waiting = true, nil
	p.mu.Unlock()
	_ = p.conn.Close()
	s.listen(p, false)
	if errors.Is(err, errFrame) || !p.welcome && !errors.Is(err, io.EOF) {
		s.log(err)
	}
	s.mu.Lock()
	delete(s.peers, p)
	s.mu.Unlock()
	s.gone.Done()
}

func (p *peer) read() error {
	in := newFrames(p.conn)
	if err := p.greet(in); err != nil {
		return err
	}
	var requests []*engine.Request
	for {
		if !in.ready() {
			p.server.engine.Admit(requests)
			requests = requests[:0]
			if err := p.await(in); err != nil {
				return err
			}
		}
		f, err := in.next()
		if err != nil {
			p.server.engine.Admit(requests)
			return err
		}
		if p.isFull() {
			p.server.engine.Admit(requests)
			requests = requests[:0]
			p.makeRoom()
		}
		switch f.kind {
		case frameRequest:
			if r := p.request(f); r != nil {
				requests = append(requests, r)
			}
		case frameStatement:
			p.statement(f)
		case framePing:
			p.tell(framePong, 0, nil)
		case frameListen:
			p.server.listen(p, f.id != 0)
		default:
			p.server.engine.Admit(requests)
			return errFrame
		}
	}
}

// await waits for a frame. A client may be silent for as long as it likes, but a frame that has begun must go on.
func (p *peer) await(in *frames) error {
	if err := p.setDeadline(time.Time{}); err != nil {
		return err
	}
	if err := in.begin(); err != nil {
		return err
	}
	if in.ready() {
		return nil
	}
	return p.setDeadline(time.Now().Add(readTime))
}

// setDeadline sets the deadline for reading, unless nothing more shall be read.
func (p *peer) setDeadline(t time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return net.ErrClosed
	}
	return p.conn.SetReadDeadline(t)
}

// stopReading ends the reading of the connection.
func (p *peer) stopReading() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = p.welcome
	_ = p.conn.SetReadDeadline(time.Now())
	p.room.Broadcast()
}

// greet reads the hello, and sends the welcome.
func (p *peer) greet(in *frames) error {
	_ = p.conn.SetDeadline(time.Now().Add(helloTime))
	f, err := in.next()
	if err != nil {
		return err
	}
	m := f.message
	if f.kind != frameHello || m.Text() != protocol {
		return errFrame
	}
	switch spoken, token := m.Int(), sha256.Sum256(m.Bytes()); {
	case m.Bad():
		return errFrame
	case spoken != version:
		p.refuse(errVersion, pg.ErrSetup)
		return errVersion
	case p.server.options.Token != "" && subtle.ConstantTimeCompare(token[:], p.server.token[:]) == 0:
		p.refuse(errToken, pg.ErrSetup)
		return errToken
	}
	if err := p.conn.SetDeadline(time.Time{}); err != nil {
		return err
	}
	in.most = MaxFrame
	p.server.mu.Lock()
	defer p.server.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.welcome = true
	p.waiting = appendFrame(p.waiting, frameWelcome, 0, wire.AppendInt(nil, version))
	if p.server.leaving {
		p.waiting = appendFrame(p.waiting, frameLeaving, 0, nil)
	}
	p.start()
	return nil
}

// refuse sends an error in place of a welcome.
func (p *peer) refuse(err error, kind error) {
	_ = p.conn.SetWriteDeadline(time.Now().Add(helloTime))
	_, _ = p.conn.Write(appendFrame(nil, frameRefusal, 0, appendError(nil, pg.NewError(err, kind), 0)))
}

// tell sends a frame that is no answer to a client that is welcome, unless the client does not read.
func (p *peer) tell(kind byte, id uint64, payload []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.welcome && !p.ended && len(p.waiting) < MaxFrame {
		p.waiting = appendFrame(p.waiting, kind, id, payload)
		p.start()
	}
}

func (p *peer) isFull() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.underWay >= maxUnderWay
}

// makeRoom waits until fewer requests are under way.
func (p *peer) makeRoom() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.underWay >= maxUnderWay && !p.ended {
		p.room.Wait()
	}
}

// sends is called before frames are sent. The caller holds p.mu.
func (p *peer) sends() { p.inFlight, p.answers = p.answers, 0 }

// wrote is called when frames were sent, or could not be. The caller holds p.mu.
func (p *peer) wrote() {
	p.underWay -= p.inFlight
	p.inFlight = 0
	p.room.Broadcast()
}

// fail ends the connection, because nothing more can be sent.
func (p *peer) fail(error) { _ = p.conn.Close() }

// accepts counts a request or statement that was read.
func (p *peer) accepts(id uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.underWay++
	p.last = id
}

// answer puts an answer into the outbox.
func (p *peer) answer(kind byte, id uint64, write func(b []byte) []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		p.underWay--
		p.room.Broadcast()
		return
	}
	start := len(p.waiting)
	p.waiting = endFrame(write(beginFrame(p.waiting, kind, id)), start)
	p.answers++
	p.start()
}

func (p *peer) answerError(id uint64, err error) {
	p.answer(frameError, id, func(b []byte) []byte { return appendError(b, err, 0) })
}

// request returns the request in a frame. It answers a request that is not valid, and returns nil.
func (p *peer) request(f frame) *engine.Request {
	p.accepts(f.id)
	r := p.intake.Request(f.message)
	if r == nil {
		p.answerError(f.id, pg.NewError(errMessage, pg.ErrSetup))
		return nil
	}
	r.To, r.ID = p, f.id
	return r
}

// Decided answers a request. See engine.Recipient.
func (p *peer) Decided(r *engine.Request) {
	if r.Err != nil {
		p.answerError(r.ID, r.Err)
	} else {
		p.answer(frameAnswer, r.ID, r.AppendAnswer)
	}
	p.server.engine.Requests.Put(r)
}

// statement runs the statement in a frame, and answers with its rows.
func (p *peer) statement(f frame) {
	p.accepts(f.id)
	id, m := f.id, f.message
	within := min(time.Duration(m.Int()), statementTime)
	sql, known := p.server.statements[m.Text()]
	arguments := readArguments(m)
	switch {
	case !m.Ended():
		p.answerError(id, pg.NewError(errMessage, pg.ErrSetup))
	case !known:
		p.answerError(id, pg.NewError(errStatement, pg.ErrSetup))
	default:
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), within)
			defer cancel()
			if err := p.run(ctx, id, sql, arguments); err != nil {
				p.answerError(id, err)
			} else {
				p.answer(frameEnd, id, func(b []byte) []byte { return b })
			}
		}()
	}
}

// run runs a statement, and sends its rows.
func (p *peer) run(ctx context.Context, id uint64, sql string, arguments []any) error {
	read := func(db pg.DB) error {
		found, err := db.Query(ctx, sql, arguments...)
		if err != nil {
			if err := pg.Unsent(db, err); err != nil {
				return err
			}
			return pg.StatementError(err)
		}
		fields := found.FieldDescriptions()
		if err := p.send(frameFields, id, appendFields(nil, fields)); err != nil {
			found.Close()
			return err
		}
		var some []byte
		_, err = pgx.ForEachRow(found, make([]any, len(fields)), func() error {
			if some = appendRow(some, found.RawValues()); len(some) < 64<<10 {
				return nil
			}
			all := some
			some = some[:0]
			return p.send(frameRows, id, all)
		})
		if err == nil && len(some) > 0 {
			err = p.send(frameRows, id, some)
		}
		if err != nil {
			return pg.StatementError(err)
		}
		return nil
	}
	switch db := p.server.engine.Database.DB.(type) {
	case *pgxpool.Pool, pg.Pool:
		return pg.Use(ctx, db, func(conn *pgx.Conn) error {
			if err := pg.Garbled(conn, sql); err != nil {
				return err
			}
			return read(conn)
		})
	default:
		return read(db)
	}
}

// send sends rows, and waits while many are not read yet.
func (p *peer) send(kind byte, id uint64, payload []byte) error {
	if len(payload) > MaxFrame-16 {
		return pg.NewError(errTooLarge, pg.ErrSetup)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.waiting) > MaxFrame && !p.ended {
		p.room.Wait()
	}
	if p.ended {
		return pg.NewError(errLost, pg.ErrUnavailable)
	}
	p.waiting = appendFrame(p.waiting, kind, id, payload)
	p.start()
	return nil
}
