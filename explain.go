package ratelimit

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/rulebook"
)

// Explanation says which policy is in force for a key, and why.
type Explanation struct {
	Origin Origin
	Row    int64  // the id of the row of rate_limit_policy; 0 if the policy in the code is in force
	Prefix string // of the row, if Origin is OriginPrefix
	// Mode is the row's: "enforce", "off" (everything is allowed) or "deny" (a ban). It is "enforce" for the policy in
	// the code.
	Mode   string
	Policy Policy    // nil if Mode is "off" or "deny"
	Until  time.Time // when the row ends, by the database's clock; the zero time if it does not
	Learnt time.Time // since when this process knows what the row says, by the database's clock
	// Shadow is the policy that is decided beside it, and ShadowRow is the id of its row. They are nil and 0 if there
	// is none, as beside "off" and "deny".
	Shadow    Policy
	ShadowRow int64
	State     Result // what [Limiter.Peek] says
	// Age is how old the knowledge of the rows may be; see [PoliciesStatus]. It is 0 for a limiter without [Policies].
	Age time.Duration
}

// Origin says where a policy comes from.
type Origin uint8

// The origins of a policy, the first that there is: an exact key comes before the longest prefix.
const (
	OriginCode      Origin = iota // [Config].Policy, or what With was given
	OriginEverybody               // a row for all keys of the limiter
	OriginPrefix                  // a row for the keys with a prefix
	OriginKey                     // a row for this key
)

// String is "code", "everybody", "prefix" or "key".
func (o Origin) String() string {
	switch o {
	case OriginCode:
		return "code"
	case OriginEverybody:
		return "everybody"
	case OriginPrefix:
		return "prefix"
	case OriginKey:
		return "key"
	default:
		return fmt.Sprintf("Origin(%d)", uint8(o))
	}
}

// MarshalText returns the String, for JSON.
func (o Origin) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// Explain tells which policy is in force for a key in this process, where it comes from, and what is left. It takes
// nothing. Errors: as Peek.
func (l *Limiter) Explain(ctx context.Context, key string) (Explanation, error) {
	state, err := l.Peek(ctx, key)
	if err != nil {
		return Explanation{}, err
	}
	e := Explanation{Mode: string(policytable.ModeEnforce), Policy: l.policy, State: state}
	if l.view == nil {
		return e, nil
	}
	e.Age = l.policies.Status().Age
	if !l.view.Table.IsReady() { // OnFailure has answered
		return e, nil
	}
	r := l.view.Row(l.model, key)
	if beside := l.view.Shadow(key); beside != nil && (r == nil || r.Value.Mode == policytable.ModeEnforce) {
		e.Shadow, e.ShadowRow = policyFrom(beside.Value.Policy), beside.ID
	}
	if r == nil {
		return e, nil
	}
	e.Row, e.Mode = r.ID, string(r.Value.Mode)
	e.Policy = policyFrom(r.Value.Policy)
	switch r.Target {
	case rulebook.Key:
		e.Origin = OriginKey
	case rulebook.Prefix:
		e.Origin, e.Prefix = OriginPrefix, r.Text
	default:
		e.Origin = OriginEverybody
	}
	e.Learnt = time.UnixMicro(r.Value.Learnt)
	if r.Value.Until != policytable.NoEnd {
		e.Until = time.UnixMicro(r.Value.Until)
	}
	return e, nil
}
