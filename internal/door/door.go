// Package door lets a process ask a service instead of Postgres. The service asks Postgres for all of its clients, and
// merges their requests as an engine merges those of a process.
//
// A connection is a byte stream: a Unix socket, TCP or TLS. Both sides send frames. A frame is its length in four bytes
// (the length counts what follows), a byte that says what it is, an id, and what [Client] and [Server] put into it. No
// frame is longer than MaxFrame. Numbers are varints as in encoding/binary, and a text has its length before it.
//
// The client begins with a hello: the name of the protocol, its version and a token. The service answers with a welcome
// or with an error. After that, the client sends requests, statements and pings, with ids that rise by one. It does not
// wait for answers, and the answers come in any order. A statement is one of the library's own: the service knows their
// texts, refuses all others, and puts its schema into them.
//
// A service that ends says that it is leaving, and the client looks for another connection, which may lead to another
// instance. At last the service tells the last id that it has read, so that the client knows which requests it can send
// again. Then it answers what it has read, and closes the connection.
//
// Neither side believes the other: a client checks that an answer fits the request, and a service checks all that the
// library would not have sent. Whoever has the token may take from all limiters, as with a role in the database.
package door

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/wire"
)

// protocol is the name of the protocol, and version its version. A service refuses other versions.
const (
	protocol = "ratelimit door"
	version  = 1
)

// MaxFrame is the largest frame, without its length.
const MaxFrame = 1 << 20

// maxHello is the largest frame before the token is known to be right.
const maxHello = 4096

// These bytes say what a frame is. The first ones come from the client.
const (
	frameHello     = 'h'
	frameRequest   = 'r'
	frameStatement = 's'
	framePing      = 'p'
	frameListen    = 'l' // tell of places in line that become slots; with the id 0: no longer

	frameWelcome = 'W'
	frameRefusal = 'R' // an error in place of a welcome
	frameAnswer  = 'A'
	frameError   = 'E' // an error in place of an answer
	frameFields  = 'F' // the columns of a statement's rows
	frameRows    = 'D'
	frameEnd     = 'Z' // the end of a statement's rows
	framePong    = 'P'
	frameLeaving = 'L'
	frameLast    = 'X' // the id is the last one that was read
	frameListens = 'N' // the service has begun to listen; with the id 0: it does not listen any more
	frameSlot    = 'S' // a place in line has become a slot
)

// These times are long compared with what a connection does in them.
const (
	// writeTime is how long the other side may take to read what is sent.
	writeTime = 10 * time.Second
	// readTime is how long a frame may take that has begun.
	readTime = 10 * time.Second
	// helloTime is how long a connection may take until the welcome.
	helloTime = 5 * time.Second
)

var (
	errFrame    = errors.New("the other side does not speak this protocol, or not in TLS as it should")
	errTooLarge = fmt.Errorf("%w: a frame is longer than %d bytes", errFrame, MaxFrame)
)

// Network splits an address into the arguments of net.Dial and net.Listen: unix:/path is a Unix socket, and all else is
// TCP.
func Network(address string) (network, addr string) {
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		return "unix", path
	}
	return "tcp", address
}

// beginFrame appends the beginning of a frame. endFrame completes the frame that begins at start.
func beginFrame(b []byte, kind byte, id uint64) []byte {
	return binary.AppendUvarint(append(b, 0, 0, 0, 0, kind), id)
}

func endFrame(b []byte, start int) []byte {
	binary.BigEndian.PutUint32(b[start:], uint32(len(b)-start-4))
	return b
}

func appendFrame(b []byte, kind byte, id uint64, payload []byte) []byte {
	start := len(b)
	return endFrame(append(beginFrame(b, kind, id), payload...), start)
}

// frame is a frame that was read. The message is valid until the next frame is read.
type frame struct {
	kind    byte
	id      uint64
	message *wire.Reader
}

// frames reads the frames of a connection.
type frames struct {
	in    *bufio.Reader
	most  int // the largest frame
	large []byte
	skip  int // how many bytes of in the last frame has
}

func newFrames(conn net.Conn) *frames {
	return &frames{in: bufio.NewReaderSize(conn, 16<<10), most: maxHello}
}

// ready returns whether a whole frame was read already.
func (f *frames) ready() bool {
	n := f.in.Buffered() - f.skip
	if n < 4 {
		return false
	}
	b, _ := f.in.Peek(f.skip + 4)
	return uint64(n) >= 4+uint64(binary.BigEndian.Uint32(b[f.skip:]))
}

// begin waits for the first byte of the next frame.
func (f *frames) begin() error {
	_, _ = f.in.Discard(f.skip)
	f.skip = 0
	_, err := f.in.Peek(1)
	return err
}

// next reads a frame.
func (f *frames) next() (frame, error) {
	_, _ = f.in.Discard(f.skip)
	f.skip = 0
	head, err := f.in.Peek(4)
	if err != nil {
		return frame{}, err
	}
	size := int64(binary.BigEndian.Uint32(head))
	if size > int64(f.most) {
		return frame{}, errTooLarge
	}
	n := int(size)
	var body []byte
	if n+4 <= f.in.Size() {
		if body, err = f.in.Peek(n + 4); err != nil {
			return frame{}, err
		}
		body, f.skip = body[4:], n+4
	} else {
		_, _ = f.in.Discard(4)
		if cap(f.large) < n {
			f.large = make([]byte, n)
		}
		body = f.large[:n]
		if _, err := io.ReadFull(f.in, body); err != nil {
			return frame{}, err
		}
	}
	m := wire.Read(body)
	got := frame{kind: m.Byte(), id: m.Uint(), message: m}
	if m.Bad() {
		return frame{}, errFrame
	}
	return got, nil
}

// outbox has the frames that wait until they are sent. Whoever puts the first frame into it starts a goroutine that
// sends them, and ends when there is nothing left. So frames that come together are sent together, and an idle
// connection has no goroutine for it.
type outbox struct {
	conn    net.Conn
	mu      *sync.Mutex // of the owner
	waiting []byte
	spare   []byte
	busy    bool
	ended   bool            // nothing more is sent
	writing bool            // frames are being sent
	sending func()          // called before frames are sent; the caller holds mu
	sent    func()          // called after frames were sent, or could not be sent; the caller holds mu
	failed  func(err error) // called when nothing more can be sent; the caller does not hold mu
}

// start sends the frames. The caller holds mu.
func (o *outbox) start() {
	if !o.busy && !o.ended && len(o.waiting) > 0 {
		o.busy = true
		go o.run()
	}
}

func (o *outbox) run() {
	for {
		o.mu.Lock()
		if len(o.waiting) == 0 || o.ended {
			o.busy = false
			o.mu.Unlock()
			return
		}
		chunk := o.waiting
		o.waiting = o.spare[:0]
		o.writing = true
		o.sending()
		o.mu.Unlock()
		_ = o.conn.SetWriteDeadline(time.Now().Add(writeTime))
		_, err := o.conn.Write(chunk)
		if o.spare = chunk; cap(chunk) > MaxFrame {
			o.spare = nil
		}
		o.mu.Lock()
		if o.writing = false; err != nil {
			o.ended, o.waiting, o.busy = true, nil, false
		}
		o.sent()
		o.mu.Unlock()
		if err != nil {
			o.failed(err)
			return
		}
	}
}
