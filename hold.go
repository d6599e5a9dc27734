package ratelimit

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
)

// Hold is a number of units that [Limiter.Hold] or [HoldAll] has set aside. It leaves less room for requests, but it
// is not usage. [Hold.Settle] counts what was really used, and frees the rest. At its end, an unsettled hold is free
// again, without a write.
//
// A Hold is safe for concurrent use. Another process can settle it by its text: see [Hold.String]. If a row of mode off
// of [Policies] allows the call, or [FailOpen] or [FallbackLocal] while Postgres is away, the Hold is empty: its calls
// succeed and count nothing, and its text is "".
type Hold struct {
	of     *holding // nil if a Hold was not made by this package
	tx     pgx.Tx
	inTx   bool         // see WithTx
	endsAt atomic.Int64 // in microseconds; 0 if it is unknown
}

// holding is what all copies of a Hold share. It is behind a pointer, so that printing a Hold shows no key.
type holding struct {
	client  *Client
	id      string      // a UUID; "" for an empty hold
	tables  string      // "e", "d" or "ed"
	limits  []heldLimit // the limits that have units set aside
	numbers int         // how many numbers Settle may have: one for each request, or for each limiter of HoldFromText
}

// heldLimit is a limit of a hold.
type heldLimit struct {
	limiter *Limiter
	key     string
	rows    int // one for each policy of an All
	number  int // the index of its number in Settle
}

// HoldResult is the decision of a [Limiter.Hold].
type HoldResult struct {
	Result

	Hold *Hold // nil if the hold was denied
}

// HoldResults is the decision of a [HoldAll].
type HoldResults struct {
	Results

	Hold *Hold // one hold for all limits; nil if it was denied
}

// Settlement is the answer to a [Hold.Settle], and to each repetition of it.
type Settlement struct {
	// Used is what was counted: 250 after a Settle(ctx, 250). If the limits have counted different numbers, it is the
	// largest.
	Used int64
	// Each has what each limit has counted, in the order of Settle's numbers. It is 0 for a limit of mode off, and for
	// a limit whose part of the hold was lost in a crash.
	Each []int64
	Late bool      // the hold had ended before, so its units may have been taken meanwhile
	At   time.Time // when the hold was settled, by the database's clock; zero for an empty hold
}

// Hold sets n of key's limit aside for at most ttl, if all of n fits as in [Limiter.AllowN]. It is for work whose cost
// is known only afterwards, such as the tokens of an answer: hold 4,000, and settle 2,719. A ttl is from 1 ms to 24
// hours; [Hold.Extend] makes it longer. n is at least 1.
//
// For example, a [FixedWindow] of 1,000 counts 500. After a Hold of 300, 200 remain. After Settle(ctx, 250), 750 are
// counted, and 250 remain. A hold always weighs in full, also in a window that begins later, and in a [TokenBucket]
// that is refilled meanwhile. RetryAfter of a denial says when the same cost fits if no hold is settled before its end.
//
// A call that is denied takes nothing, and has no Hold. While Postgres is away, [Config].OnFailure answers as for
// AllowN, and an allowed call gets an empty Hold, whose calls count nothing. Leases and shadows do not decide a Hold.
// After an [ErrOutcomeUnknown], or if ctx has ended, the units may be set aside. So the result then has a Hold beside
// the error, and the caller can cancel it.
//
// Errors: those of AllowN; a [*HoldError] for a ttl out of range; a [*CostError] for n below 1.
func (l *Limiter) Hold(ctx context.Context, key string, n int64, ttl time.Duration) (HoldResult, error) {
	return l.hold(ctx, nil, key, n, ttl)
}

// Hold is [Limiter.Hold]. After a rollback of tx there is no hold. The Hold is not bound to tx: settle it after the
// commit, or by [Hold.WithTx].
func (t TxLimiter) Hold(ctx context.Context, key string, n int64, ttl time.Duration) (HoldResult, error) {
	if err := checkTx(t.tx); err != nil {
		return HoldResult{}, err
	}
	return t.limiter.hold(ctx, t.tx, key, n, ttl)
}

func (l *Limiter) hold(
	ctx context.Context, tx pgx.Tx, key string, n int64, ttl time.Duration,
) (result HoldResult, err error) {
	if l.client.observer != nil {
		defer l.observe(time.Now(), key, n, &result.Result, &err)
	}
	micros, err := microsToHold(ttl)
	if err != nil {
		return HoldResult{}, err
	}
	if err := checkKey(key); err != nil {
		return HoldResult{}, err
	}
	policy, row, err := l.inForce(ctx, key)
	switch {
	case n < 1:
		return HoldResult{}, &CostError{Cost: n, Limit: policy.Limit, Least: 1}
	case row != nil:
		result.Result, err = l.byRow(row, n)
		return result.orEmpty(l.client), err
	}
	if err := checkCost(n, policy); err != nil {
		return HoldResult{}, err
	}
	if err == nil {
		result, err = l.holdInDatabase(ctx, tx, policy, key, n, micros)
	}
	if err != nil && tx == nil {
		if result.Result, err = l.onError(err, policy, key, n); err == nil {
			result.Hold = nil // if the database has made one, it ends by itself
		}
		return result.orEmpty(l.client), err
	}
	l.countDenial(key, n, &result.Result, err)
	return result, err
}

// orEmpty returns the result with an empty hold if it is allowed without a hold.
func (r HoldResult) orEmpty(client *Client) HoldResult {
	if r.Allowed && r.Hold == nil {
		r.Hold = &Hold{of: &holding{client: client, numbers: 1}}
	}
	return r
}

// holdInDatabase is hold for a key whose policy is known. Beside an error, the result may have a hold: see perhaps.
func (l *Limiter) holdInDatabase(
	ctx context.Context, tx pgx.Tx, policy *model.Policy, key string, n, micros int64,
) (result HoldResult, err error) {
	if err := ctx.Err(); err != nil {
		return HoldResult{}, gaveUp(err)
	}
	of := &holding{
		client: l.client, id: newHoldID([]heldLimit{{key: key}}), numbers: 1,
		limits: []heldLimit{{limiter: l, key: key, rows: len(policy.Rules)}},
	}
	of.tables = of.tablesOf()
	ask := l.question(policy, key, n)
	o, err := l.client.engine.Hold(ctx, tx, &ask, of.id, micros)
	if err != nil {
		err = publicError(err)
		return HoldResult{Hold: of.perhaps(ctx, err)}, err
	}
	if result.set(&o); result.Allowed {
		result.Hold = of.until(result.DecidedAt, micros)
	}
	return result, nil
}

// HoldAll holds units of all of several limits for at most ttl, such as a tenant's tokens of the day and of the minute,
// or of none of them. Its rules are those of [AllowAll], also for transactions and shards. There is one Hold for all
// limits.
//
// Behind a proxy for shards, all keys must share a part in braces. Keys that are on one shard by chance may be on
// several after the shards have grown. Then a Settle is an error that settles nothing, and the units are free when the
// hold ends. [HoldFromText] always refuses such a hold behind a proxy. Both errors are an [ErrSharded].
//
// Errors: those of AllowAll, and a [*HoldError] for a ttl out of range. Beside an error, the result may have a
// Hold, as in [Limiter.Hold].
func HoldAll(ctx context.Context, ttl time.Duration, requests ...Request) (results HoldResults, err error) {
	if observed(requests) {
		defer observeAll(time.Now(), requests, &results.Results, &err)
	}
	micros, err := microsToHold(ttl)
	if err != nil {
		return HoldResults{}, err
	}
	s, tx, err := prepare(ctx, requests)
	if err != nil {
		return HoldResults{}, err
	}
	of := &holding{client: s.client, numbers: len(requests)}
	for i, e := range s.entries {
		if e.answer == nil {
			of.limits = append(of.limits, heldLimit{e.limiter, e.key, len(e.policy.Rules), i})
		}
	}
	if len(of.limits) > 0 {
		of.id, of.tables = newHoldID(of.limits), of.tablesOf()
		s.asked.Hold(of.id, micros)
	}
	if results.Results, err = s.decide(ctx, tx); err != nil {
		results.Hold = of.perhaps(ctx, err)
		return results, err
	}
	switch {
	case !results.Allowed:
	case of.id == "":
		results.Hold = &Hold{of: of}
	default:
		results.Hold = of.until(results.Each[of.limits[0].number].DecidedAt, micros)
	}
	return results, nil
}

// until returns a hold that was made at a time.
func (of *holding) until(at time.Time, micros int64) *Hold {
	h := &Hold{of: of}
	h.endsAt.Store(at.UnixMicro() + micros)
	return h
}

// perhaps returns a hold if it may exist although the call has returned err, or nil.
func (of *holding) perhaps(ctx context.Context, err error) *Hold {
	if of.id != "" && (errors.Is(err, ErrOutcomeUnknown) || ctx.Err() != nil && errors.Is(err, ctx.Err())) {
		return &Hold{of: of}
	}
	return nil
}

// tablesOf returns which tables have the hold.
func (of *holding) tablesOf() (tables string) {
	durable := func(l heldLimit) bool { return l.limiter.space.Durable }
	if slices.ContainsFunc(of.limits, func(l heldLimit) bool { return !durable(l) }) {
		tables = "e"
	}
	if slices.ContainsFunc(of.limits, durable) {
		tables += "d"
	}
	return tables
}

// newHoldID returns a random UUID for a hold of these limits. Its last 16 bits are those by which a proxy finds the
// shard of the first key. The version of the UUID is 8 instead of 4 if another key may be on another shard, now or when
// there are more shards. Then a proxy refuses to look for the hold, because it could find only some of its parts.
func newHoldID(limits []heldLimit) string {
	first, version := limits[0].key, byte(0x40)
	for _, l := range limits {
		if shardkey.Tag(l.key) != shardkey.Tag(first) {
			version = 0x80
		}
	}
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	id[6], id[8] = id[6]&0x0f|version, id[8]&0x3f|0x80
	binary.BigEndian.PutUint16(id[14:], uint16(shardkey.Number(first)))
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// microsToHold returns ttl in microseconds, or an error if it is out of range.
func microsToHold(ttl time.Duration) (int64, error) {
	if ttl < model.MinHold || ttl > model.MaxHold {
		return 0, &HoldError{Reason: fmt.Sprintf(
			"the ttl of a hold is %v, and must be from 1ms to 24h; extend the hold while its work goes on", ttl)}
	}
	return model.MicrosUp(ttl), nil
}

// Settle ends the hold and counts what was used at this moment, as [Limiter.Charge] does: also above what was held, and
// above the limit. Pass one number for all limits of the hold. Or pass one for each request of [HoldAll], in their
// order, or for each limiter of [HoldFromText]. A number is from 0 to 2^62. The policies that are in force now count.
// Either all limits are settled, or none.
//
// Settle can be repeated, also after an error: a hold is settled once. Until an hour after the settlement, each
// repetition returns the first Settlement and changes nothing, whatever its numbers are. Settle after the hold's end
// counts all the same, and says that it was Late.
//
// Errors: [ErrHoldUnknown]; a [*ChargeError] if a key would owe more than 10 limits; a [*HoldError] for the wrong
// number of numbers, or if the policy of a key has got more or fewer parts; a [*CostError]; those of Allow. Except
// perhaps after an [ErrOutcomeUnknown], the hold is as before.
func (h *Hold) Settle(ctx context.Context, used ...int64) (Settlement, error) {
	if err := h.check(); err != nil {
		return Settlement{}, err
	}
	numbers, err := h.of.numbersFor(used)
	if err != nil {
		return Settlement{}, err
	}
	settlement := Settlement{Each: make([]int64, h.of.numbers)}
	if h.of.id == "" {
		return settlement, nil
	}
	asks, err := h.of.asks(ctx, numbers)
	if err != nil {
		return Settlement{}, err
	}
	if err := ctx.Err(); err != nil {
		return Settlement{}, gaveUp(err)
	}
	settled, err := h.of.client.engine.Settle(ctx, h.tx, h.of.id, asks)
	if !h.inTx {
		h.of.wakeUp()
	}
	if err != nil {
		return Settlement{}, publicError(err)
	}
	if i := slices.IndexFunc(settled, func(s engine.Settled) bool { return s.Refused }); i >= 0 {
		return Settlement{}, &ChargeError{Charge: asks[i].Cost, Accepted: settled[i].Accepted}
	}
	known := false
	for i, s := range settled {
		if !s.Known {
			continue
		}
		known = true
		each := &settlement.Each[h.of.limits[i].number]
		*each = max(*each, s.Used)
		settlement.Used, settlement.Late = max(settlement.Used, s.Used), settlement.Late || s.Late
		if s.At.After(settlement.At) {
			settlement.At = s.At
		}
	}
	if !known {
		return Settlement{}, ErrHoldUnknown
	}
	return settlement, nil
}

// Cancel ends a hold of which nothing was used. It is Settle(ctx, 0). If [Limiter.Hold] has returned an error beside
// the Hold, an [ErrHoldUnknown] of Cancel means that nothing was set aside.
func (h *Hold) Cancel(ctx context.Context) (Settlement, error) { return h.Settle(ctx, 0) }

// Extend makes a hold that lives last for at least ttl from now. A ttl is from 1 ms to 24 hours. Errors:
// [ErrHoldEnded]; [ErrHoldUnknown]; a [*HoldError] for a ttl out of range, or if the policy of a key no longer has as
// many parts as the hold; those of Allow. Except perhaps after an [ErrOutcomeUnknown], the hold is as before.
func (h *Hold) Extend(ctx context.Context, ttl time.Duration) error {
	if err := h.check(); err != nil {
		return err
	}
	micros, err := microsToHold(ttl)
	if err != nil || h.of.id == "" {
		return err
	}
	asks, err := h.of.asks(ctx, make([]int64, h.of.numbers))
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return gaveUp(err)
	}
	granted, at, err := h.of.client.engine.Extend(ctx, h.tx, h.of.id, micros, asks)
	switch {
	case err != nil:
		return publicError(err)
	case granted == engine.UnknownHold:
		return ErrHoldUnknown
	case granted == engine.EndedHold:
		return ErrHoldEnded
	}
	for end := at.UnixMicro() + micros; ; {
		before := h.endsAt.Load()
		if before >= end || h.endsAt.CompareAndSwap(before, end) {
			return nil
		}
	}
}

// WithTx returns a Hold that settles, cancels and extends within tx. A commit of tx keeps that, and a rollback undoes
// it. Until tx ends, other calls for the key wait: see [Limiter.WithTx]. Only the result's EndsAt knows of an Extend
// in tx.
func (h *Hold) WithTx(tx pgx.Tx) *Hold {
	with := &Hold{tx: tx, inTx: true}
	if h != nil {
		with.of = h.of
		with.endsAt.Store(h.endsAt.Load())
	}
	return with
}

// EndsAt returns when the units are free again, by the database's clock, if the hold is not settled or extended. It
// does not know of an Extend in another process. It is zero for an empty hold, and beside an error of [Limiter.Hold].
func (h *Hold) EndsAt() time.Time {
	if h == nil {
		return time.Time{}
	}
	if micros := h.endsAt.Load(); micros != 0 {
		return time.UnixMicro(micros)
	}
	return time.Time{}
}

// String returns a text of about 40 characters by which another process can settle the hold: see [HoldFromText]. It
// has a random number, but no key and no secret. Whoever has it can do nothing without rights in the database. It is ""
// for an empty hold.
func (h *Hold) String() string {
	if h == nil || h.of == nil || h.of.id == "" {
		return ""
	}
	return h.of.id + "." + h.of.tables
}

var errNoHoldText error = &HoldError{Reason: "this text is no hold: it is cut off, changed, or something else; " +
	"pass what Hold.String has returned"}

var holdText = regexp.MustCompile(`^([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.(e|d|ed)$`)

// HoldFromText returns the hold whose [Hold.String] has returned text, also in another process. It asks the database
// for it, and changes nothing. Pass all limiters that the hold may belong to. They must share a [Client]. If several
// are passed, Settle takes one number for all of them, or one for each of them. The number of a limiter that the hold
// does not belong to is ignored.
//
// Errors: [ErrHoldUnknown], also for a hold in another schema or database; a [*HoldError] for a text that cannot be
// from [Hold.String], or for a hold of another limiter; a [*StoreError]; the context's error, if it ends first.
func HoldFromText(ctx context.Context, text string, limiters ...*Limiter) (*Hold, error) {
	if len(limiters) == 0 || slices.Contains(limiters, nil) {
		return nil, &HoldError{Reason: "HoldFromText needs the limiters that the hold may belong to; pass at least one"}
	}
	of := &holding{client: limiters[0].client, numbers: len(limiters)}
	for _, l := range limiters {
		if l.client != of.client {
			return nil, &HoldError{
				Reason: "the limiters have different clients, and must share one; make them with Client.Limiter",
			}
		}
	}
	if text == "" {
		return &Hold{of: of}, nil
	}
	words := holdText.FindStringSubmatch(text)
	if words == nil {
		return nil, errNoHoldText
	}
	of.id, of.tables = words[1], words[2]
	parts, err := of.client.engine.FindHold(ctx, of.id)
	if err != nil {
		return nil, publicError(err)
	}
	h := &Hold{of: of}
	for _, p := range parts {
		if err := of.add(p, limiters); err != nil {
			return nil, err
		}
		if ends := p.EndsAt.UnixMicro(); h.endsAt.Load() == 0 || ends < h.endsAt.Load() {
			h.endsAt.Store(ends)
		}
	}
	// A crash of the server loses the part in rate_limit_ephemeral.
	if found := of.tablesOf(); found != of.tables && (found != "d" || of.tables != "ed") {
		return nil, errNoHoldText
	}
	return h, nil
}

// HoldFromText returns a hold of this limiter: see the function [HoldFromText].
func (l *Limiter) HoldFromText(ctx context.Context, text string) (*Hold, error) {
	return HoldFromText(ctx, text, l)
}

// add adds a part that the database has found.
func (of *holding) add(p engine.HoldPart, limiters []*Limiter) error {
	for number, l := range limiters {
		if l.space.Durable != p.Durable || !slices.Contains(algorithm.RowNames(l.space.Name), p.Name) {
			continue
		}
		i := slices.IndexFunc(of.limits, func(h heldLimit) bool { return h.number == number && h.key == p.Key })
		if i < 0 {
			i = len(of.limits)
			of.limits = append(of.limits, heldLimit{limiter: l, key: p.Key, number: number})
		}
		of.limits[i].rows++
		return nil
	}
	first := limiters[0].space.Name
	if p.Name == first {
		return &HoldError{Limiter: first, HeldBy: p.Name, Reason: fmt.Sprintf(
			"the hold is of a limiter %q with another Durable; find it with that limiter", p.Name)}
	}
	return &HoldError{Limiter: first, HeldBy: p.Name, Reason: fmt.Sprintf(
		"the hold is of the limiter %q, and not of %q; find it with that limiter", p.Name, first)}
}

// check returns an error if the hold cannot be asked for.
func (h *Hold) check() error {
	switch {
	case h == nil || h.of == nil:
		return &HoldError{Reason: "there is no hold: it was denied, or was not made by Hold, HoldAll or HoldFromText"}
	case h.inTx:
		return checkTx(h.tx)
	}
	return nil
}

// maxUsed is the largest number that a settlement may have.
const maxUsed = 1 << 62

// numbersFor returns a number for each request or limiter.
func (of *holding) numbersFor(used []int64) ([]int64, error) {
	for _, n := range used {
		if n < 0 || n > maxUsed {
			return nil, &CostError{Cost: n, Limit: maxUsed, settle: true}
		}
	}
	switch len(used) {
	case of.numbers:
		return used, nil
	case 1:
		return slices.Repeat(used, of.numbers), nil
	}
	return nil, &HoldError{Reason: fmt.Sprintf(
		"Settle got %d numbers; pass 1 for all limits, or %d, one for each", len(used), of.numbers)}
}

// asks returns what to ask for each limit, by the policies that are in force now. A row of mode off counts nothing.
func (of *holding) asks(ctx context.Context, numbers []int64) ([]engine.Ask, error) {
	asks := make([]engine.Ask, len(of.limits))
	for i, held := range of.limits {
		l := held.limiter
		policy, row, err := l.inForce(ctx, held.key)
		if err != nil {
			return nil, err
		}
		if len(policy.Rules) != held.rows {
			return nil, &HoldError{Reason: fmt.Sprintf("the policy of %q now has %d parts, and the hold has %d; pass "+
				"a limiter with as many parts to HoldFromText", l.space.Name, len(policy.Rules), held.rows)}
		}
		if err := checkTakes(policy); err != nil {
			return nil, err
		}
		asks[i] = l.question(policy, held.key, numbers[held.number])
		if row != nil && row.Value.Mode == policytable.ModeOff {
			asks[i].Cost = 0
		}
	}
	return asks, nil
}

// wakeUp lets waiting requests ask again, because they may fit now.
func (of *holding) wakeUp() {
	for _, held := range of.limits {
		held.limiter.waiting.WakeUp(held.key)
	}
}
