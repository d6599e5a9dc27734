package faults

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// slotPuppetVariable is the environment variable with the settings of a child process that obeys commands about slots.
const slotPuppetVariable = "RATELIMIT_TEST_SLOT_PUPPET"

// puppetSettings are the settings of a puppet. Its limiter has the name "test".
type puppetSettings struct {
	URL     string
	Limit   int64
	Durable bool
}

// puppetCommand is one line of a puppet's standard input.
type puppetCommand struct {
	ID      int // what the replies to this command have as ID
	Do      string
	Slot    int // the ID of the command that has acquired it
	Key     string
	Options ratelimit.SlotOptions
}

// puppetReply is one line of a puppet's standard output.
type puppetReply struct {
	ID    int
	Error string // "", "lost", "released", or another error
	Fence int64
	// Of "await": the last time, in microseconds since 1970, at which the slot's context had not ended. The clock is
	// read before the context is checked. Gap is the longest time between two checks near that time.
	Last, Gap int64
	OK        bool // of "write": whether the resource has accepted it
}

// slotErrorText is the Error of a puppetReply.
func slotErrorText(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, ratelimit.ErrSlotLost):
		return "lost"
	case errors.Is(err, ratelimit.ErrSlotReleased):
		return "released"
	}
	return err.Error()
}

// puppetProcess is the state of a child process that obeys commands.
type puppetProcess struct {
	limiter *ratelimit.Limiter
	pool    *pgxpool.Pool

	mu    sync.Mutex
	out   *json.Encoder
	slots map[int]*ratelimit.Slot
}

// slotPuppetInChild obeys commands until its standard input ends. It returns the exit status.
func slotPuppetInChild(text string) int {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	var settings puppetSettings
	if err := json.Unmarshal([]byte(text), &settings); err != nil {
		return 2
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	p := &puppetProcess{out: json.NewEncoder(os.Stdout), slots: map[int]*ratelimit.Slot{}}
	var err error
	if p.pool, err = pgxpool.New(ctx, settings.URL); err != nil {
		return 2
	}
	client, err := ratelimit.NewClient(p.pool, ratelimit.ClientConfig{Timeout: amply})
	if err != nil {
		return 2
	}
	p.limiter, err = client.Limiter(ratelimit.Config{
		Name: "test", Policy: ratelimit.Concurrency{Limit: settings.Limit}, Durable: settings.Durable,
	})
	if err != nil {
		return 2
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var command puppetCommand
		if json.Unmarshal(lines.Bytes(), &command) != nil {
			return 2
		}
		go func() {
			reply := p.obey(ctx, command)
			reply.ID = command.ID
			p.mu.Lock()
			defer p.mu.Unlock()
			_ = p.out.Encode(reply)
		}()
	}
	return 0
}

func (p *puppetProcess) obey(ctx context.Context, c puppetCommand) (reply puppetReply) {
	p.mu.Lock()
	slot := p.slots[c.Slot]
	p.mu.Unlock()
	switch c.Do {
	case "acquire":
		slot, err := p.limiter.Acquire(ctx, c.Key, c.Options)
		if err != nil {
			return puppetReply{Error: slotErrorText(err)}
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.slots[c.ID] = slot
		return puppetReply{Fence: slot.Fence()}
	case "look":
		reply.Error = slotErrorText(context.Cause(slot.Context(ctx)))
	case "await":
		during := slot.Context(ctx)
		ticker := time.NewTicker(time.Millisecond)
		defer ticker.Stop()
		before := time.Now()
		for now := before; ; now = time.Now() {
			reply.Gap = max(reply.Gap*9/10, now.Sub(before).Microseconds())
			if during.Err() != nil {
				break
			}
			before, reply.Last = now, now.UnixMicro()
			<-ticker.C
		}
		reply.Error = slotErrorText(context.Cause(during))
	case "write":
		err := p.pool.QueryRow(ctx, writeToResource, c.Key, slot.Fence()).Scan(&reply.OK)
		reply.Error = slotErrorText(err)
	case "release":
		reply.Error = slotErrorText(slot.Release(ctx))
	default:
		reply.Error = "unknown command " + c.Do
	}
	return reply
}

// slotPuppet is a child process that obeys commands. It ends with the test.
type slotPuppet struct {
	*exec.Cmd

	stdin io.WriteCloser

	mu      sync.Mutex
	ids     int
	replies map[int]chan puppetReply
}

func newSlotPuppet(t *testing.T, settings puppetSettings) *slotPuppet {
	t.Helper()
	text, err := json.Marshal(settings)
	require.NoError(t, err)
	p := &slotPuppet{Cmd: exec.CommandContext(t.Context(), os.Args[0]), replies: map[int]chan puppetReply{}}
	p.Env = append(os.Environ(), slotPuppetVariable+"="+string(text))
	p.Stderr = os.Stderr
	p.stdin, err = p.StdinPipe()
	require.NoError(t, err)
	stdout, err := p.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.Start())
	heard := make(chan struct{})
	go func() {
		defer close(heard)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			var reply puppetReply
			if json.Unmarshal(lines.Bytes(), &reply) == nil {
				p.mu.Lock()
				p.replies[reply.ID] <- reply
				p.mu.Unlock()
			}
		}
	}()
	t.Cleanup(func() {
		_ = p.Process.Kill()
		<-heard
		_ = p.Wait() // it was killed
	})
	return p
}

// begin sends a command. The returned function waits for the reply.
func (p *slotPuppet) begin(t *testing.T, c puppetCommand) (id int, reply func() puppetReply) {
	t.Helper()
	p.mu.Lock()
	p.ids++
	c.ID = p.ids
	told := make(chan puppetReply, 1)
	p.replies[c.ID] = told
	p.mu.Unlock()
	line, err := json.Marshal(c)
	require.NoError(t, err)
	_, err = p.stdin.Write(append(line, '\n'))
	require.NoError(t, err)
	return c.ID, func() puppetReply {
		select {
		case reply := <-told:
			return reply
		case <-time.After(testkit.Amply):
			require.FailNow(t, "the child does not answer", c.Do)
			return puppetReply{}
		}
	}
}

// do sends a command, and returns the reply.
func (p *slotPuppet) do(t *testing.T, c puppetCommand) puppetReply {
	t.Helper()
	_, reply := p.begin(t, c)
	return reply()
}

// acquire acquires a slot of the key "key".
func (p *slotPuppet) acquire(t *testing.T, options ratelimit.SlotOptions) (slot int, fence int64) {
	t.Helper()
	slot, reply := p.begin(t, puppetCommand{Do: "acquire", Key: "key", Options: options})
	r := reply()
	require.Empty(t, r.Error)
	return slot, r.Fence
}

// stop stops the process, and waits until it stands still.
func (p *slotPuppet) stop(t *testing.T) {
	t.Helper()
	require.NoError(t, p.Process.Signal(syscall.SIGSTOP))
	var status syscall.WaitStatus
	_, err := syscall.Wait4(p.Process.Pid, &status, syscall.WUNTRACED, nil)
	require.NoError(t, err)
	require.True(t, status.Stopped())
}

func (p *slotPuppet) wake(t *testing.T) {
	t.Helper()
	require.NoError(t, p.Process.Signal(syscall.SIGCONT))
}

// writeToResource writes to a resource that remembers the largest fence that it has seen, and refuses smaller ones. Its
// list of writes has the accepted ones in their order.
const writeToResource = `
	WITH accepted AS (
		INSERT INTO resource AS r (key, largest) VALUES ($1, $2)
		ON CONFLICT (key) DO UPDATE SET largest = $2 WHERE r.largest <= $2
		RETURNING 1
	), listed AS (INSERT INTO writes (key, fence) SELECT $1, $2 FROM accepted)
	SELECT EXISTS (SELECT FROM accepted)`

// newResource makes the tables of writeToResource.
func newResource(t *testing.T, db pgtest.Executor) {
	t.Helper()
	pgtest.Exec(t, db, "CREATE TABLE resource (key text PRIMARY KEY, largest bigint NOT NULL)")
	pgtest.Exec(t, db, "CREATE TABLE writes (n bigserial PRIMARY KEY, key text NOT NULL, fence bigint NOT NULL)")
}

// slotRow is a slot in the list of the database.
type slotRow struct {
	Status int16
	Ends   int64
}

// slotOf returns the slot with a fence.
func slotOf(t *testing.T, db pgtest.Querier, durable bool, fence int64) (s slotRow) {
	t.Helper()
	err := db.QueryRow(t.Context(), fmt.Sprintf("SELECT status, ends_at FROM %s_hold WHERE fence = $1", pgtest.Table(durable)),
		fence).Scan(&s.Status, &s.Ends)
	require.NoError(t, err)
	return s
}

// waitForNoSession waits until the server has no session of a child that was killed, so that nothing of it is to come.
func waitForNoSession(t *testing.T, db pgtest.Querier, application string) {
	t.Helper()
	testkit.WaitUntil(t, func() bool {
		return pgtest.Scalar[int](t, db, "SELECT count(*)::int FROM pg_stat_activity WHERE application_name = $1", application) == 0
	})
}
