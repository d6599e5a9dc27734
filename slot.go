package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/keeper"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// SlotOptions says what a slot is for. The zero value is a slot of 1 unit that lasts for 30 seconds, and is renewed
// while this process lives.
type SlotOptions struct {
	// N is how many units of the limit the slot takes, such as 3 of 8 for a big job. Defaults to 1.
	N int64
	// TTL is how long the slot lasts after its last renewal, so it is how long a process that dies keeps the slot.
	// Slots are renewed three times in each TTL, and one statement renews all slots with the same TTL. From 1 second to
	// 24 hours; defaults to 30 seconds.
	TTL time.Duration
	// Holder tells operators who has the slot. It has at most 256 bytes of UTF-8 without control characters. Defaults
	// to the host's name and the number of the process, such as "worker-7 4242".
	Holder string
	// Group is who the slot is for, such as "tenant:7". If callers wait, the next slot goes to the group that holds the
	// fewest units for its Weight, and within a group to the caller that has waited longest. All callers without a
	// Group are one group. Its length and characters are limited as those of Holder.
	Group string
	// Weight is the weight of Group, from 1 to 1,000. Defaults to 1. While all groups have waiting callers, a group
	// with Weight 2 holds twice as many units as a group with Weight 1.
	Weight int
	// Strict ends the slot's Context as soon as a renewal fails. Defaults to false: the renewal is repeated, and the
	// Context ends a tenth of TTL before the slot does.
	Strict bool
}

// SlotResult is the decision of a [Limiter.TryAcquire].
type SlotResult struct {
	// Result is the decision. RetryAfter of a denial is the time until enough slots end, if nobody renews or releases
	// one. A holder that lives renews its slot, so a slot may be free earlier or later.
	Result

	Slot *Slot // nil if the request was denied
}

// Slot is a number of units of a [Concurrency] limit that this process has until it releases them. The slot is renewed
// while the process lives. A Slot is safe for concurrent use.
//
// If a row of mode off of [Policies] allows the call, or [FailOpen] while Postgres is away, the Slot is empty, and
// limits nothing.
type Slot struct {
	limiter *Limiter
	place   engine.SlotPlace
	kept    *keeper.Slot // nil for an empty slot
	id      string
}

const (
	defaultSlotTTL = 30 * time.Second
	minSlotTTL     = time.Second
	maxSlotText    = 256 // bytes
	maxSlotWeight  = 1000
)

// TryAcquire acquires a slot of key's limit if one is free, and if no other caller waits for one. The policy is a
// [Concurrency], or an [All] of a Concurrency and policies that count. Then TryAcquire also takes N from each of the
// others. If they deny that, it gives the slot back. Release the slot when the work is done.
//
// For example, of Concurrency{Limit: 5} the first five calls get a slot. The sixth is denied, and its RetryAfter is
// about 30 seconds, when the first slot would end. After one Release, the next call gets a slot.
//
// A denial for lack of a slot writes no row. While Postgres is away, [Config].OnFailure answers, but a [FallbackLocal]
// returns the error, because it cannot know which slots are held.
//
// Errors: a [*SlotError] for a policy without slots, for options out of range, or for a client without a pool; those of
// AllowN. After an [ErrOutcomeUnknown], a slot without a holder may exist until its TTL ends.
func (l *Limiter) TryAcquire(ctx context.Context, key string, options SlotOptions) (result SlotResult, err error) {
	if l.client.observer != nil {
		defer l.observe(time.Now(), key, max(options.N, 1), &result.Result, &err)
	}
	wish, err := l.wish(key, options)
	if err != nil {
		return SlotResult{}, err
	}
	result, err = wish.acquire(ctx, false)
	l.countDenial(key, wish.n, &result.Result, err)
	return result, err
}

// Acquire acquires a slot as TryAcquire does, but waits until there is one. For each key, the callers of all processes
// wait in one line. A caller whose ctx ends leaves the line. A caller that dies stays in it until its TTL ends.
//
// A slot that is released goes to the next caller at once, also in another process. For this, a process that waits has
// a connection of its own, which listens to Postgres; a [Service] has one for all its processes. Without a
// *pgxpool.Pool, through a pooler in transaction mode, and behind a proxy for shards, the process asks twice a second
// instead.
//
// With an [All], the caller takes from the other policies when it has a slot. If they deny that, it gives the slot
// back, waits for their RetryAfter, and joins the line again. If a row of mode deny applies to the key, such as a ban,
// the caller waits until it is gone.
//
// Errors: those of TryAcquire, and ctx's error. If OnFailure denies the call, Acquire returns the error of the
// database.
func (l *Limiter) Acquire(ctx context.Context, key string, options SlotOptions) (*Slot, error) {
	wish, err := l.wish(key, options)
	if err != nil {
		return nil, err
	}
	for {
		result, err := wish.acquire(ctx, true)
		if result.Slot != nil || err != nil {
			return result.Slot, err
		}
		if result.Source == SourcePolicy { // a row of mode deny may be deleted before it ends
			result.RetryAfter = time.Second
		}
		timer := time.NewTimer(result.RetryAfter)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, gaveUp(ctx.Err())
		}
	}
}

// slotWish is a request for a slot.
type slotWish struct {
	limiter *Limiter
	key     string
	n       int64
	ttl     time.Duration
	strict  bool
	details engine.SlotWish
}

func (l *Limiter) wish(key string, o SlotOptions) (slotWish, error) {
	w := slotWish{
		limiter: l, key: key, n: o.N, ttl: o.TTL, strict: o.Strict,
		details: engine.SlotWish{Holder: o.Holder, Group: o.Group, Weight: o.Weight},
	}
	if w.n == 0 {
		w.n = 1
	}
	if w.ttl == 0 {
		w.ttl = defaultSlotTTL
	}
	if w.details.Holder == "" {
		host, _ := os.Hostname()
		w.details.Holder = fmt.Sprintf("%s %d", host, os.Getpid())
	}
	if err := checkKey(key); err != nil {
		return w, err
	}
	switch {
	case !l.client.engine.Pooled():
		return w, &SlotError{"slots are renewed in the background, which needs a *pgxpool.Pool; make the Client with " +
			"a pool instead of a single connection or transaction"}
	case w.n < 0:
		return w, &CostError{Cost: w.n, Limit: model.MaxSlots, Least: 1}
	case w.ttl < minSlotTTL || w.ttl > model.MaxHold:
		return w, &SlotError{fmt.Sprintf("the TTL of a slot is %v, and must be from 1s to 24h; a slot is renewed "+
			"while its process lives, so 30s is enough for long work", w.ttl)}
	case o.Weight < 0 || o.Weight > maxSlotWeight:
		return w, &SlotError{fmt.Sprintf("the Weight of a slot is %d, and must be from 1 to %d",
			o.Weight, maxSlotWeight)}
	}
	for field, text := range map[string]string{"Holder": o.Holder, "Group": o.Group} {
		if len(text) > maxSlotText || !utf8.ValidString(text) || strings.ContainsFunc(text, unicode.IsControl) {
			return w, &SlotError{fmt.Sprintf("the %s of a slot has %d bytes, and must be at most %d bytes of UTF-8 "+
				"without control characters", field, len(text), maxSlotText)}
		}
	}
	return w, nil
}

// policy returns the policy that is in force, or an answer that needs no database.
func (w *slotWish) policy(ctx context.Context) (policy *model.Policy, answer *SlotResult, err error) {
	l := w.limiter
	policy, row, err := l.inForce(ctx, w.key)
	switch {
	case row != nil:
		result, err := l.byRow(row, w.n)
		return nil, w.without(result), err
	case !policy.HasSlots:
		return nil, nil, &SlotError{fmt.Sprintf("the policy %q has no slots; acquire from a Concurrency such as "+
			"%q, or call Allow", policyFrom(policy), Concurrency{Limit: 5})}
	case w.n > policy.Limit:
		return nil, nil, &CostError{Cost: w.n, Limit: policy.Limit}
	case err != nil:
		return policy, nil, err
	}
	l.view.Shadow(policy, w.key) // logs that it is passed over
	if err := ctx.Err(); err != nil {
		return nil, nil, gaveUp(err)
	}
	return policy, nil, nil
}

// without returns an answer of [Policies] or OnFailure. If it is allowed, it has an empty slot.
func (w *slotWish) without(result Result) *SlotResult {
	r := SlotResult{Result: result}
	if r.Allowed {
		r.Slot = &Slot{limiter: w.limiter}
	}
	return &r
}

// onError answers for a database that cannot decide. Nobody waits in line for a database.
func (w *slotWish) onError(policy *model.Policy, err error, wait bool) (SlotResult, error) {
	if w.limiter.onFailure.answer == fallbackLocal {
		return SlotResult{}, err
	}
	result, failed := w.limiter.onError(err, policy, w.key, w.n)
	if wait && !result.Allowed {
		failed = err
	}
	return *w.without(result), failed
}

// acquire acquires a slot, and takes from the rates beside it. With wait, it stands in line. Then a result without a
// slot means that the rates have denied the request, or that the place in line was lost.
func (w *slotWish) acquire(ctx context.Context, wait bool) (SlotResult, error) {
	policy, answer, err := w.policy(ctx)
	switch {
	case answer != nil:
		return *answer, err
	case err != nil && policy == nil:
		return SlotResult{}, err
	case err != nil:
		return w.onError(policy, err, wait)
	}
	o, slot, err := w.ask(ctx, policy, wait)
	if err != nil {
		return w.onError(policy, err, wait)
	}
	if slot != nil && wait {
		select {
		case <-slot.kept.Got():
			o.Allowed, o.RetryAfter = true, 0
		case <-slot.kept.Context().Done(): // for example in a crash of the server
			return SlotResult{}, nil
		case <-ctx.Done():
			slot.kept.Drop(keeper.ErrReleased)
			go slot.leave()
			return SlotResult{}, gaveUp(ctx.Err())
		}
	}
	if len(policy.Rules) > 1 {
		n := w.n
		if slot == nil {
			n = 0 // look, to tell what is left
		}
		question := w.limiter.question(policy, w.key, n)
		o, err = w.limiter.client.engine.TakeRates(ctx, &question, o)
		if slot != nil && (err != nil || !o.Allowed) {
			slot.kept.Drop(keeper.ErrReleased)
			slot.leave()
			slot = nil
		}
		if err != nil {
			return w.onError(policy, publicError(err), wait)
		}
	}
	result := SlotResult{Slot: slot}
	result.set(&o)
	return result, nil
}

// ask sends the request to the database. The slot is nil if there is neither a slot nor a place in line.
func (w *slotWish) ask(ctx context.Context, policy *model.Policy, wait bool) (engine.Outcome, *Slot, error) {
	l := w.limiter
	details := w.details
	details.Wait = wait
	slot := &Slot{limiter: l, id: newHoldID([]heldLimit{{key: w.key}})}
	// Another process may hand the slot over before this one has read the answer.
	slot.kept = l.client.engine.Keeper.Expect(slot.id, w.ttl, w.strict, func() int64 {
		return l.view.Slots(l.model, w.key)
	})
	sent := time.Now()
	question := l.question(policy, w.key, w.n)
	a, err := l.client.engine.Acquire(ctx, &question, slot.id, model.MicrosUp(w.ttl), details)
	slot.place = a.Place
	if err != nil {
		slot.kept.Drop(keeper.ErrLost)
		go slot.leaveUndecided(a.Undecided) // the slot may exist all the same
		return engine.Outcome{}, nil, publicError(err)
	}
	if a.Told.ID == "" {
		slot.kept.Drop(keeper.ErrLost)
		return a.Outcome, nil, nil
	}
	slot.kept.Confirm(a.Told, sent)
	return a.Outcome, slot, nil
}

// leave gives a slot back that nobody knows of, or a place in line, and returns whether the database had it. After an
// error it goes on trying in the background for a while, because the slot would be nobody's until its TTL ends.
func (s *Slot) leave() (known bool) {
	ctx, cancel := context.WithTimeout(context.Background(), s.limiter.client.timeout)
	defer cancel()
	known, err := s.limiter.client.engine.Release(ctx, s.place, s.id)
	if err != nil {
		go s.keepLeaving()
	}
	return known
}

func (s *Slot) keepLeaving() {
	ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
	defer cancel()
	for {
		select {
		case <-time.After(leavePause):
		case <-ctx.Done():
			return
		}
		if _, err := s.limiter.client.engine.Release(ctx, s.place, s.id); err == nil {
			return
		}
	}
}

// These say how often, and for how long, another attempt is made to give a slot back.
const (
	leavePause = time.Second
	leaveTime  = time.Minute
)

// leaveUndecided gives a slot back that the database may still be making. The channel says when it has decided, and is
// nil if it has answered with an error. A statement whose connection broke may go on for a while, but not for longer
// than a call may take. So leaveUndecided tries once more after that time.
func (s *Slot) leaveUndecided(decided <-chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), s.limiter.client.timeout)
	defer cancel()
	if decided != nil {
		select {
		case <-decided:
		case <-ctx.Done():
		}
	}
	if !s.leave() {
		<-ctx.Done()
		s.leave()
	}
}

// Context returns a context that ends when ctx ends, or when the slot ends. Then [context.Cause] is [ErrSlotReleased]
// after a Release, or [ErrSlotLost]. A slot is lost when an operator has taken it away, or when only a tenth of its TTL
// is left, because renewals have failed. In this tenth, stop the work: until the slot ends, nobody else has it.
//
// By the monotonic clock of this process, the context ends before the slot can end. But a process that was paused, for
// example because its machine was, may do something before it notices that. If this would do harm, let the resource
// behind the limit check the slot's Fence.
func (s *Slot) Context(ctx context.Context) context.Context {
	if s.kept == nil {
		return ctx
	}
	ctx, end := context.WithCancelCause(ctx)
	if s.kept.Context().Err() != nil {
		end(s.cause()) // AfterFunc would do so a moment later, in a goroutine of its own
		return ctx
	}
	stop := context.AfterFunc(s.kept.Context(), func() { end(s.cause()) })
	context.AfterFunc(ctx, func() { stop() })
	return ctx
}

// cause returns why the slot has ended.
func (s *Slot) cause() error {
	cause := context.Cause(s.kept.Context())
	switch {
	case errors.Is(cause, keeper.ErrReleased):
		return ErrSlotReleased
	case cause == keeper.ErrLost: //nolint:errorlint // otherwise it has joined the error of a renewal
		return ErrSlotLost
	}
	return errors.Join(ErrSlotLost, publicError(cause))
}

// Fence returns a number that is larger than that of each earlier slot of the key. A resource that remembers the
// largest Fence that it has seen, and refuses smaller ones, is safe from holders that have lost their slots. It is 0
// for an empty slot.
func (s *Slot) Fence() int64 {
	if s.kept == nil {
		return 0
	}
	return s.kept.Fence()
}

// Release gives the slot back, and ends its contexts. What the other policies of an [All] have counted stays counted.
// Call it also when the slot is lost: if it has not ended yet, others need not wait for its end. The end of ctx does
// not end Release, because ctx may be that of the work, or made by Context.
//
// Errors: [ErrSlotReleased] for a second call; [ErrSlotLost] if the slot was lost before; those of Allow, after which
// the slot ends within its TTL. None of these calls touches a slot of somebody else.
func (s *Slot) Release(ctx context.Context) error {
	if s.kept == nil {
		return nil
	}
	first := s.kept.Drop(keeper.ErrReleased)
	cause := s.cause()
	if !first && errors.Is(cause, ErrSlotReleased) {
		return cause
	}
	known, err := s.limiter.client.engine.Release(context.WithoutCancel(ctx), s.place, s.id)
	switch {
	case !first:
		return cause
	case err != nil:
		return publicError(err)
	case !known:
		return ErrSlotLost
	}
	return nil
}
