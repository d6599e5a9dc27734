package web

import (
	"context"
	"net/http"
	"regexp"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// A slot over HTTP is renewed by its caller, because the caller's process is what must be alive. The slots of
// ratelimit.Limiter.Acquire are renewed by this process, so these functions call those for SQL.

type (
	acquireRequest struct {
		askRequest

		TTL     *float64 `json:"ttl"`     // defaults to 30
		Timeout *float64 `json:"timeout"` // defaults to 0: the caller does not wait
		Holder  string   `json:"holder"`
	}
	releaseRequest struct {
		Slot string `json:"slot"`
	}
	renewRequest struct {
		releaseRequest

		TTL *float64 `json:"ttl"`
	}
	slotAnswer struct {
		Allowed           bool    `json:"allowed"`
		RetryAfter        seconds `json:"retry_after"`
		RetryAfterSeconds int64   `json:"retry_after_seconds"`
		// Slot is missing in a denial.
		Slot   string     `json:"slot,omitempty"`
		Fence  int64      `json:"fence,omitempty"`
		TTL    seconds    `json:"ttl"`
		EndsAt *time.Time `json:"ends_at,omitempty"`
	}
	renewed struct {
		Slot   string     `json:"slot"`
		Fence  int64      `json:"fence,omitempty"`
		TTL    seconds    `json:"ttl"`
		EndsAt *time.Time `json:"ends_at,omitempty"`
	}
	released struct {
		Released bool `json:"released"`
	}
)

func (a slotAnswer) status() int { return statusOf(a.Allowed) }
func (renewed) status() int      { return http.StatusOK }
func (released) status() int     { return http.StatusOK }

const (
	defaultSlotTTL = 30 * time.Second
	leastSlotTTL   = time.Second
	maxHolder      = 256 // bytes
	// emptySlot is a slot that counts nothing, as rate_limit_acquire returns it for the mode off.
	emptySlot = "00000000-0000-0000-0000-000000000000"
	// askAgain is how often a request that waits asks whether its turn has come.
	askAgain = 500 * time.Millisecond
)

// query sends a statement of one row.
func (h *handler) query(ctx context.Context, statement string, args []any, targets ...any) error {
	ctx, cancel := context.WithTimeout(ctx, h.Timeout)
	defer cancel()
	return pg.Query(ctx, h.DB, true, pg.Qualify(statement, h.Schema), args, targets, func() error { return nil })
}

const acquireSlot = `
SELECT a.allowed, a.slot::text, a.fence, (extract(epoch FROM a.retry_after) * 1000000)::bigint,
    statement_timestamp() + $5::bigint * interval '1 us'
FROM rate_limit_acquire($1, $2, $3, $4, $5::bigint * interval '1 us', $6, $7, $8) AS a`

func (h *handler) acquire(ctx context.Context, header http.Header, q *acquireRequest) (answer, error) {
	l, err := h.limiterOf("", q.subject)
	if err != nil {
		return nil, err
	}
	lasts, err := duration("ttl", q.TTL, defaultSlotTTL, leastSlotTTL, mostTTL)
	if err != nil {
		return nil, err
	}
	timeout, err := duration("timeout", q.Timeout, 0, 0, h.MaxWait)
	if err != nil {
		return nil, err
	}
	cost := defaultTo(q.Cost, 1)
	if cost < 1 {
		return nil, wrong("cost", "It is %d, and must be at least 1.", cost)
	}
	if len(q.Holder) > maxHolder || strings.ContainsFunc(q.Holder, unicode.IsControl) || !utf8.ValidString(q.Holder) {
		return nil, wrong("holder", "It may have %d bytes, without control characters.", maxHolder)
	}
	if strings.ContainsRune(q.Key, 0) {
		return nil, wrong("key", "It has a NUL character.")
	}
	config := l.Config()
	policy := &[]string{config.Policy.String()}[0]
	why, err := l.Explain(ctx, q.Key)
	if err != nil {
		return nil, at("", err)
	}
	state := why.State
	if state.Source == ratelimit.SourceFailedOpen || state.Source == ratelimit.SourceFailedClosed {
		return h.withoutDatabase(header, l, state), nil
	}
	if why.Row != 0 {
		policy = nil // the database obeys the row
	}
	a := slotAnswer{TTL: seconds(lasts)}
	var slot *string
	var fence *int64
	var retryAfter int64
	var endsAt pgtype.Timestamptz
	// If the caller leaves meanwhile, the slot must be known, so that it can be given back.
	err = h.query(context.WithoutCancel(ctx), acquireSlot,
		[]any{config.Name, q.Key, policy, cost, lasts.Microseconds(), config.Durable, q.Holder, timeout > 0},
		&a.Allowed, &slot, &fence, &retryAfter, &endsAt)
	mode := config.OnFailure
	if pg.IsAway(err) && (mode == ratelimit.FailOpen() || mode == ratelimit.FailClosed()) {
		state.Allowed, state.RetryAfter = mode == ratelimit.FailOpen(), time.Second
		return h.withoutDatabase(header, l, state), nil
	}
	if err != nil {
		return nil, err
	}
	if slot != nil && !a.Allowed { // a place in the line
		turn, err := h.stand(ctx, *slot, lasts, timeout)
		if err != nil {
			return nil, err
		}
		a.Allowed, fence, endsAt = turn.held, turn.fence, turn.endsAt
	}
	if a.Allowed && ctx.Err() != nil {
		h.leave(ctx, *slot)
		return nil, ctx.Err()
	}
	if a.Allowed {
		retryAfter = 0
		state.Remaining = max(state.Remaining-cost, 0)
		if state.Each() != nil {
			if now, err := l.Peek(ctx, q.Key); err == nil {
				state = now
			}
		}
		a.Slot, a.EndsAt = *slot, endOf(endsAt)
		if fence != nil {
			a.Fence = *fence
		}
	}
	state.Allowed, state.RetryAfter = a.Allowed, time.Duration(retryAfter)*time.Microsecond
	h.tellSlot(header, l, &a, state)
	return a, nil
}

// tellSlot sets when to try again, in the answer and in its header fields.
func (h *handler) tellSlot(header http.Header, l *ratelimit.Limiter, a *slotAnswer, state ratelimit.Result) {
	a.RetryAfter, a.RetryAfterSeconds = seconds(state.RetryAfter), whole(state.RetryAfter)
	h.tell(header, l, state)
}

// withoutDatabase answers as on_failure says. A local share is an error, because this process does not know which slots
// are held.
func (h *handler) withoutDatabase(header http.Header, l *ratelimit.Limiter, state ratelimit.Result) slotAnswer {
	a := slotAnswer{Allowed: state.Allowed}
	if a.Allowed {
		a.Slot, state.RetryAfter = emptySlot, 0
	}
	h.tellSlot(header, l, &a, state)
	return a
}

const renewSlot = `
SELECT r.allowed, r.fence, r.ends_at FROM rate_limit_renew($1::text::uuid, $2::bigint * interval '1 us') AS r`

// turn is what a renewal says of a slot or of a place in the line.
type turn struct {
	held   bool
	fence  *int64
	endsAt pgtype.Timestamptz // not valid if it is lost
}

// prolong makes a slot or a place in the line last.
func (h *handler) prolong(ctx context.Context, slot string, lasts time.Duration) (t turn, err error) {
	err = h.query(ctx, renewSlot, []any{slot, lasts.Microseconds()}, &t.held, &t.fence, &t.endsAt)
	return t, err
}

// stand stands in the line until the slot is held, or leaves it when the time is over or the caller has left.
func (h *handler) stand(ctx context.Context, place string, lasts, timeout time.Duration) (t turn, err error) {
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	ticker := time.NewTicker(min(askAgain, lasts/3+time.Millisecond)) // a place lasts as long as a slot would
	defer ticker.Stop()
	for {
		over := false
		select {
		case <-ticker.C:
		case <-within.Done():
			over = true
		}
		if ctx.Err() == nil { // also when the time is over: the turn may have come
			t, err = h.prolong(ctx, place, lasts)
		} else {
			err = ctx.Err()
		}
		switch {
		case err == nil && t.held:
			return t, nil
		case err == nil && !t.endsAt.Valid: // the place is lost, and nothing is left to give back
			return t, nil
		case err != nil || over:
			h.leave(ctx, place)
			return t, err
		}
	}
}

// leave gives a place or a slot back that nobody knows of. If this fails, it ends with its ttl.
func (h *handler) leave(ctx context.Context, slot string) {
	var known bool
	_ = h.query(context.WithoutCancel(ctx), releaseSlot, []any{slot}, &known)
}

func endOf(t pgtype.Timestamptz) *time.Time {
	if !t.Valid || t.InfinityModifier != pgtype.Finite {
		return nil
	}
	return timeOf(t.Time)
}

var uuid = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

func checkSlot(slot string) error {
	if !uuid.MatchString(slot) {
		return wrong("slot", "It is no slot: it is missing, cut off or changed; send the slot of an answer.")
	}
	return nil
}

func lost() error {
	return problem{Status: http.StatusConflict, Title: "The slot is lost.", Kind: "slot_lost", Field: "slot",
		Detail: "It was not renewed in time, was released, or somebody took it away. Stop the work."}
}

func (h *handler) renew(ctx context.Context, _ http.Header, q *renewRequest) (answer, error) {
	if err := checkSlot(q.Slot); err != nil {
		return nil, err
	}
	lasts, err := duration("ttl", q.TTL, defaultSlotTTL, leastSlotTTL, mostTTL)
	if err != nil {
		return nil, err
	}
	a := renewed{Slot: q.Slot, TTL: seconds(lasts)}
	if q.Slot == emptySlot {
		return a, nil
	}
	t, err := h.prolong(ctx, q.Slot, lasts)
	if err != nil {
		return nil, err
	}
	if !t.held || t.fence == nil {
		return nil, lost()
	}
	a.Fence, a.EndsAt = *t.fence, endOf(t.endsAt)
	return a, nil
}

const releaseSlot = `SELECT rate_limit_release($1::text::uuid)`

func (h *handler) release(ctx context.Context, _ http.Header, q *releaseRequest) (answer, error) {
	if err := checkSlot(q.Slot); err != nil {
		return nil, err
	}
	if q.Slot == emptySlot {
		return released{true}, nil
	}
	var known bool
	if err := h.query(ctx, releaseSlot, []any{q.Slot}, &known); err != nil {
		return nil, err
	}
	if !known {
		return nil, lost()
	}
	return released{true}, nil
}
