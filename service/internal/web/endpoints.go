package web

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
)

// seconds is a duration in JSON: a number of seconds, rounded up to milliseconds, so that a caller who waits so long
// does not come too early.
type seconds time.Duration

func (s seconds) MarshalJSON() ([]byte, error) {
	millis := int64((time.Duration(s) + time.Millisecond - 1) / time.Millisecond)
	return strconv.AppendFloat(nil, float64(millis)/1000, 'f', -1, 64), nil
}

// whole returns d in seconds, rounded up, as retry_after_seconds of rate_limit_allow.
func whole(d time.Duration) int64 {
	return min(int64(math.Ceil(d.Seconds())), math.MaxInt32)
}

// duration returns a duration of a request, which is in seconds, or zero if it is missing.
func duration(field string, value *float64, zero, least, most time.Duration) (time.Duration, error) {
	if value == nil {
		return zero, nil
	}
	if !(*value >= least.Seconds() && *value <= most.Seconds()) {
		return 0, wrong(field, "It is %v, and must be from %v to %v seconds.", *value, least.Seconds(), most.Seconds())
	}
	return time.Duration(math.Round(*value*1e6)) * time.Microsecond, nil
}

// These are the requests.
type (
	subject struct {
		Limiter string `json:"limiter"`
		Key     string `json:"key"`
	}
	askRequest struct {
		subject

		Cost *int64 `json:"cost"` // defaults to 1
	}
	waitRequest struct {
		askRequest

		Timeout *float64 `json:"timeout"`
	}
	allRequest struct {
		Limits []askRequest `json:"limits"`
	}
	refundRequest struct {
		Limiter string `json:"limiter"`
		Receipt string `json:"receipt"`
		Cost    *int64 `json:"cost"` // defaults to all
	}
	chargeRequest struct {
		subject

		Cost *int64 `json:"cost"`
	}
	holdRequest struct {
		chargeRequest

		TTL *float64 `json:"ttl"`
	}
	cancelRequest struct {
		Limiter string  `json:"limiter"`
		Hold    *string `json:"hold"`
	}
	settleRequest struct {
		cancelRequest

		Used *int64 `json:"used"`
	}
	extendRequest struct {
		cancelRequest

		TTL *float64 `json:"ttl"`
	}
)

// These are the answers.
type (
	decision struct {
		Allowed           bool      `json:"allowed"`
		Source            string    `json:"source"`
		Limit             int64     `json:"limit"`
		Remaining         int64     `json:"remaining"`
		RetryAfter        seconds   `json:"retry_after"`
		RetryAfterSeconds int64     `json:"retry_after_seconds"`
		ResetAfter        seconds   `json:"reset_after"`
		Held              int64     `json:"held,omitempty"`
		DecidedAt         time.Time `json:"decided_at"`
		Receipt           string    `json:"receipt,omitempty"`
	}
	allAnswer struct {
		Allowed           bool       `json:"allowed"`
		RetryAfter        seconds    `json:"retry_after"`
		RetryAfterSeconds int64      `json:"retry_after_seconds"`
		Each              []decision `json:"each"`
	}
	holdAnswer struct {
		decision

		// Hold is missing in a denial. It is "" if the policy of the key counts nothing.
		Hold   *string    `json:"hold,omitempty"`
		EndsAt *time.Time `json:"ends_at,omitempty"`
	}
	balance struct {
		Limit      int64     `json:"limit"`
		Remaining  int64     `json:"remaining"`
		ResetAfter seconds   `json:"reset_after"`
		DecidedAt  time.Time `json:"decided_at"`
	}
	chargeAnswer struct {
		balance

		Owed              int64   `json:"owed"`
		RetryAfter        seconds `json:"retry_after"`
		RetryAfterSeconds int64   `json:"retry_after_seconds"`
		Receipt           string  `json:"receipt,omitempty"`
	}
	settlement struct {
		Used      int64      `json:"used"`
		Late      bool       `json:"late"`
		SettledAt *time.Time `json:"settled_at,omitempty"`
	}
	extended struct {
		EndsAt *time.Time `json:"ends_at,omitempty"`
	}
)

func statusOf(allowed bool) int {
	if allowed {
		return http.StatusOK
	}
	return http.StatusTooManyRequests
}

func (d decision) status() int   { return statusOf(d.Allowed) }
func (a allAnswer) status() int  { return statusOf(a.Allowed) }
func (a holdAnswer) status() int { return statusOf(a.Allowed) }
func (balance) status() int      { return http.StatusOK }
func (settlement) status() int   { return http.StatusOK }
func (extended) status() int     { return http.StatusOK }

// decisionOf returns a result as an answer, and sets the header fields.
func (h *handler) decisionOf(header http.Header, l *ratelimit.Limiter, result ratelimit.Result) (decision, error) {
	h.tell(header, l, result)
	d := decision{
		Allowed: result.Allowed, Source: result.Source.String(), Limit: result.Limit, Remaining: result.Remaining,
		RetryAfter: seconds(result.RetryAfter), RetryAfterSeconds: whole(result.RetryAfter),
		ResetAfter: seconds(result.ResetAfter), Held: result.Held, DecidedAt: result.DecidedAt,
	}
	var err error
	d.Receipt, err = receiptOf(result)
	return d, err
}

// tell sets the header fields of a result.
func (h *handler) tell(header http.Header, l *ratelimit.Limiter, result ratelimit.Result) {
	config := l.Config()
	h.Headers.Set(header, shownName(config.Name), config.Policy, result)
}

// receiptOf returns the receipt of a result, or "" if it took nothing.
func receiptOf(result ratelimit.Result) (string, error) {
	text, err := result.Receipt()
	if errors.Is(err, ratelimit.ErrNothingToRefund) {
		return "", nil
	}
	return text, err
}

// shownName returns a limiter's name if it can be in a header field.
func shownName(name string) string {
	if strings.ContainsFunc(name, func(c rune) bool { return c < ' ' || c > '~' || c == '"' || c == '\\' }) {
		return "limit"
	}
	return name
}

func (h *handler) limiter(prefix, name string) (*ratelimit.Limiter, error) {
	if name == "" {
		return nil, wrong(prefix+"limiter", "It is missing; name a limiter of the configuration.")
	}
	l, ok := h.Limiters.Limiter(name)
	if !ok {
		return nil, problem{Status: http.StatusNotFound, Title: "There is no such limiter.", Field: prefix + "limiter",
			Kind: "unknown_limiter", Detail: "Name a limiter of the service's configuration, or one that has a row " +
				"of rate_limit_policy for all its keys."}
	}
	return l, nil
}

const maxKey = 512 // bytes

// limiterOf returns the limiter of a subject whose key can be used.
func (h *handler) limiterOf(prefix string, s subject) (*ratelimit.Limiter, error) {
	switch {
	case s.Key == "":
		return nil, wrong(prefix+"key", "It is missing or empty.")
	case len(s.Key) > maxKey:
		return nil, wrong(prefix+"key", "It has %d bytes, and may have %d; send a hash of it.", len(s.Key), maxKey)
	}
	return h.limiter(prefix, s.Limiter)
}

func defaultTo(n *int64, value int64) int64 {
	if n == nil {
		return value
	}
	return *n
}

// number returns a number that must be there.
func number(field string, n *int64) (int64, error) {
	if n == nil {
		return 0, wrong(field, "It is missing.")
	}
	return *n, nil
}

// at adds the field that an error of the library is about.
func at(prefix string, err error) error {
	switch ratelimit.ErrorKind(err) {
	case "invalid_key":
		return atField{err, prefix + "key"}
	case "invalid_cost":
		return atField{err, prefix + "cost"}
	}
	return err
}

func (h *handler) ask(ctx context.Context, header http.Header, q *askRequest) (answer, error) {
	l, err := h.limiterOf("", q.subject)
	if err != nil {
		return nil, err
	}
	result, err := l.AllowN(ctx, q.Key, defaultTo(q.Cost, 1))
	if err != nil {
		return nil, at("", err)
	}
	return h.decisionOf(header, l, result)
}

func (h *handler) look(ctx context.Context, header http.Header, q *subject) (answer, error) {
	l, err := h.limiterOf("", *q)
	if err != nil {
		return nil, err
	}
	result, err := l.Peek(ctx, q.Key)
	if err != nil {
		return nil, at("", err)
	}
	return h.decisionOf(header, l, result)
}

func (h *handler) wait(ctx context.Context, header http.Header, q *waitRequest) (answer, error) {
	l, err := h.limiterOf("", q.subject)
	if err != nil {
		return nil, err
	}
	timeout, err := duration("timeout", q.Timeout, h.MaxWait, 0, h.MaxWait)
	if err != nil {
		return nil, err
	}
	if timeout == 0 {
		return h.ask(ctx, header, &q.askRequest)
	}
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	result, err := l.WaitN(within, q.Key, defaultTo(q.Cost, 1))
	if err == nil {
		return h.decisionOf(header, l, result)
	}
	early, isEarly := errors.AsType[*ratelimit.WaitError](err)
	if !isEarly && (ctx.Err() != nil || within.Err() == nil) {
		return nil, at("", err)
	}
	// The time is over, or would be. The answer is what a look says, but it is a denial.
	if result, err = l.Peek(ctx, q.Key); err != nil {
		return nil, at("", err)
	}
	result.Allowed = false
	if isEarly {
		result.RetryAfter = max(result.RetryAfter, early.RetryAfter)
	}
	return h.decisionOf(header, l, result)
}

const maxLimits = 100 // of one AllowAll

func (h *handler) all(ctx context.Context, header http.Header, q *allRequest) (answer, error) {
	if len(q.Limits) < 1 || len(q.Limits) > maxLimits {
		return nil, wrong("limits", "It has %d limits, and must have from 1 to %d.", len(q.Limits), maxLimits)
	}
	limiters := make([]*ratelimit.Limiter, len(q.Limits))
	requests := make([]ratelimit.Request, len(q.Limits))
	for i, one := range q.Limits {
		l, err := h.limiterOf(indexed(i), one.subject)
		if err != nil {
			return nil, err
		}
		limiters[i], requests[i] = l, l.Request(one.Key, defaultTo(one.Cost, 1))
	}
	results, err := ratelimit.AllowAll(ctx, requests...)
	if which, ok := errors.AsType[*ratelimit.RequestError](err); ok {
		return nil, at(indexed(which.Index), err)
	}
	if err != nil {
		return nil, err
	}
	a := allAnswer{
		Allowed: results.Allowed, RetryAfter: seconds(results.RetryAfter),
		RetryAfterSeconds: whole(results.RetryAfter),
	}
	for i, result := range results.Each {
		d, err := h.decisionOf(header, limiters[i], result)
		if err != nil {
			return nil, err
		}
		a.Each = append(a.Each, d)
	}
	header.Del("Retry-After")
	if !a.Allowed { // the longest of all
		httplimit.None.Set(header, "", nil, ratelimit.Result{RetryAfter: results.RetryAfter})
	}
	return a, nil
}

func indexed(i int) string { return fmt.Sprintf("limits[%d].", i) }

func balanceOf(b ratelimit.Balance) balance {
	return balance{
		Limit: b.Limit, Remaining: b.Remaining, ResetAfter: seconds(b.ResetAfter), DecidedAt: b.DecidedAt,
	}
}

func (h *handler) refund(ctx context.Context, header http.Header, q *refundRequest) (answer, error) {
	l, err := h.limiter("", q.Limiter)
	if err != nil {
		return nil, err
	}
	if q.Receipt == "" {
		return nil, wrong("receipt", "It is missing; send the receipt of an answer.")
	}
	result, err := l.ParseReceipt(q.Receipt)
	if err != nil {
		return nil, atField{err, "receipt"}
	}
	var b ratelimit.Balance
	if q.Cost == nil {
		b, err = l.Refund(ctx, result)
	} else {
		b, err = l.RefundN(ctx, result, *q.Cost)
	}
	if err != nil {
		return nil, at("", err)
	}
	h.tell(header, l, ratelimit.Result{
		Allowed: true, Limit: b.Limit, Remaining: b.Remaining, ResetAfter: b.ResetAfter, DecidedAt: b.DecidedAt,
	})
	return balanceOf(b), nil
}

func (h *handler) charge(ctx context.Context, header http.Header, q *chargeRequest) (answer, error) {
	l, err := h.limiterOf("", q.subject)
	if err != nil {
		return nil, err
	}
	cost, err := number("cost", q.Cost)
	if err != nil {
		return nil, err
	}
	c, err := l.Charge(ctx, q.Key, cost)
	if err != nil {
		return nil, at("", err)
	}
	a := chargeAnswer{
		balance: balanceOf(ratelimit.Balance{
			Limit: c.Limit, Remaining: c.Remaining, ResetAfter: c.ResetAfter, DecidedAt: c.DecidedAt,
		}),
		Owed: c.Owed, RetryAfter: seconds(c.RetryAfter), RetryAfterSeconds: whole(c.RetryAfter),
	}
	h.tell(header, l, c.Result())
	a.Receipt, err = receiptOf(c.Result())
	return a, err
}

const (
	leastTTL = time.Millisecond
	mostTTL  = 24 * time.Hour
)

// ttl returns the ttl of a request, which must be there.
func ttl(value *float64) (time.Duration, error) {
	if value == nil {
		return 0, wrong("ttl", "It is missing; say for how many seconds.")
	}
	return duration("ttl", value, 0, leastTTL, mostTTL)
}

func (h *handler) hold(ctx context.Context, header http.Header, q *holdRequest) (answer, error) {
	l, err := h.limiterOf("", q.subject)
	if err != nil {
		return nil, err
	}
	cost, err := number("cost", q.Cost)
	if err != nil {
		return nil, err
	}
	lasts, err := ttl(q.TTL)
	if err != nil {
		return nil, err
	}
	result, err := l.Hold(ctx, q.Key, cost, lasts)
	if err != nil {
		if result.Hold != nil { // it may exist, and the caller cannot learn its text
			h.cancelLater(ctx, result.Hold)
		}
		return nil, at("", err)
	}
	d, err := h.decisionOf(header, l, result.Result)
	if err != nil {
		return nil, err
	}
	a := holdAnswer{decision: d, EndsAt: timeOf(result.Hold.EndsAt())}
	if result.Hold != nil {
		text := result.Hold.String()
		a.Hold = &text
	}
	return a, nil
}

// cancelLater cancels a hold that nobody knows of. If this fails, it ends with its ttl.
func (h *handler) cancelLater(ctx context.Context, hold *ratelimit.Hold) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.Timeout)
	defer cancel()
	_, _ = hold.Cancel(ctx)
}

func timeOf(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}

func (h *handler) holdOf(ctx context.Context, q cancelRequest) (*ratelimit.Hold, error) {
	l, err := h.limiter("", q.Limiter)
	if err != nil {
		return nil, err
	}
	if q.Hold == nil {
		return nil, wrong("hold", "It is missing; send the hold of an answer, even if it is empty.")
	}
	hold, err := l.HoldFromText(ctx, *q.Hold)
	if err != nil {
		return nil, atField{err, "hold"}
	}
	return hold, nil
}

func settlementOf(s ratelimit.Settlement, err error) (answer, error) {
	if ratelimit.ErrorKind(err) == "invalid_cost" {
		err = atField{err, "used"}
	}
	return settlement{Used: s.Used, Late: s.Late, SettledAt: timeOf(s.At)}, err
}

func (h *handler) settle(ctx context.Context, _ http.Header, q *settleRequest) (answer, error) {
	used, err := number("used", q.Used)
	if err != nil {
		return nil, err
	}
	hold, err := h.holdOf(ctx, q.cancelRequest)
	if err != nil {
		return nil, err
	}
	return settlementOf(hold.Settle(ctx, used))
}

func (h *handler) cancel(ctx context.Context, _ http.Header, q *cancelRequest) (answer, error) {
	hold, err := h.holdOf(ctx, *q)
	if err != nil {
		return nil, err
	}
	return settlementOf(hold.Cancel(ctx))
}

func (h *handler) extend(ctx context.Context, _ http.Header, q *extendRequest) (answer, error) {
	lasts, err := ttl(q.TTL)
	if err != nil {
		return nil, err
	}
	hold, err := h.holdOf(ctx, q.cancelRequest)
	if err != nil {
		return nil, err
	}
	if err := hold.Extend(ctx, lasts); err != nil {
		return nil, err
	}
	return extended{EndsAt: timeOf(hold.EndsAt())}, nil
}
