package limitertest

import (
	"context"
	"reflect"
	"slices"
	"unsafe"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/waitline"
)

// field returns a pointer to an unexported field of the struct that the pointer of refers to. So tests in other
// packages see what is behind the public interface, and package ratelimit needs no code for tests.
func field[T any](of any, name string) *T {
	return (*T)(unsafe.Pointer(reflect.ValueOf(of).Elem().FieldByName(name).UnsafeAddr()))
}

// Client returns the client of a limiter.
func Client(l *ratelimit.Limiter) *ratelimit.Client { return *field[*ratelimit.Client](l, "client") }

// Engine returns the engine that decides for a limiter.
func Engine(l *ratelimit.Limiter) *engine.Engine { return EngineOf(Client(l)) }

// EngineOf returns the engine that decides for the limiters of a client.
func EngineOf(c *ratelimit.Client) *engine.Engine { return *field[*engine.Engine](c, "engine") }

// Space returns the engine's Space for a limiter: its name, and the table of its keys.
func Space(l *ratelimit.Limiter) *engine.Space { return *field[*engine.Space](l, "space") }

// Table returns a process's copy of the table of policies.
func Table(p *ratelimit.Policies) *policytable.Table { return *field[*policytable.Table](p, "table") }

// View returns the part of the table of policies that a limiter uses.
func View(l *ratelimit.Limiter) *policytable.View { return *field[*policytable.View](l, "view") }

// Lines returns the lines in which callers of Wait wait.
func Lines(l *ratelimit.Limiter) *waitline.Lines[ratelimit.Result] {
	return *field[*waitline.Lines[ratelimit.Result]](l, "waiting")
}

// Receipt returns the receipt of a result's take, or nil.
func Receipt(r ratelimit.Result) *engine.Receipt { return field[engine.Claim](&r, "taken").Receipt }

// Forged returns the result of a take that never happened.
func Forged(l *ratelimit.Limiter, key string, n int64) ratelimit.Result {
	r := engine.NewReceipt(Space(l), Model(l.Config().Policy), key, n)
	for i := range r.Parts {
		r.Parts[i].Units = n
	}
	result := ratelimit.Result{Allowed: true}
	*field[engine.Claim](&result, "taken") = engine.Claim{Receipt: r}
	return result
}

// ResultOf returns the result that a caller gets for an outcome.
func ResultOf(o *engine.Outcome) ratelimit.Result {
	r := ratelimit.Result{
		Allowed: o.Allowed, Source: ratelimit.SourceDatabase, Limit: o.Limit, Remaining: o.Remaining,
		RetryAfter: o.RetryAfter, ResetAfter: o.ResetAfter, DecidedAt: o.DecidedAt,
	}
	if o.By == engine.ByDenial {
		r.Source = ratelimit.SourceCachedDenial
	}
	*field[engine.Claim](&r, "taken") = o.Claim
	return r
}

// Under calls Limiter.With for a policy of any type.
func Under(l *ratelimit.Limiter, policy ratelimit.Policy) *ratelimit.Limiter {
	with := *l
	*field[ratelimit.Policy](&with, "policy"), *field[*model.Policy](&with, "model") = policy, Model(policy)
	return &with
}

// AllowAllTx calls AllowAll with requests that take within a transaction.
func AllowAllTx(ctx context.Context, tx pgx.Tx, requests ...ratelimit.Request) (ratelimit.Results, error) {
	requests = slices.Clone(requests) // the caller may also use the requests without a transaction
	for i := range requests {
		*field[bool](&requests[i], "inTx"), *field[pgx.Tx](&requests[i], "tx") = true, tx
	}
	return ratelimit.AllowAll(ctx, requests...)
}

// Model returns a policy in the type that the engine uses.
func Model(p ratelimit.Policy) *model.Policy {
	numbers, err := algorithm.Parse(p.String())
	if err != nil {
		panic(err)
	}
	rules := make([]model.Rules, len(numbers))
	for i, n := range numbers {
		rules[i] = model.Of(n)
	}
	return model.NewPolicy(rules...)
}

// Rule returns the first rules of a policy. The policy should be for keys with one row.
func Rule(p ratelimit.Policy) model.Rules { return Model(p).Rules[0] }

// Policy returns the policy with these numbers.
func Policy(n algorithm.Numbers) ratelimit.Policy {
	p, err := ratelimit.ParsePolicy(n.String())
	if err != nil {
		panic(err)
	}
	return p
}
