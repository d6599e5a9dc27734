package ratelimit

import (
	"context"
	"time"

	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/rulebook"
)

// Explanation says which policy is in force for a key, and why.
type Explanation struct {
	Origin Origin
	Row    int64     // the id of the row of rate_limit_policy, if a row is in force
	Prefix string    // the prefix of the row, if Origin is OriginPrefix
	Mode   string    // of the row: "enforce", "off" (all is allowed) or "deny" (a ban); "enforce" without a row
	Policy Policy    // nil if Mode is "off" or "deny"
	Until  time.Time // when the row ends, by the database's clock; zero if the row does not end
	Learnt time.Time // when this process learnt of the row, by the database's clock

	Shadow    Policy // the policy of a row of mode shadow, decided beside Policy; nil without such a row
	ShadowRow int64  // the id of the row of Shadow

	State Result        // what [Limiter.Peek] returns for the key
	Age   time.Duration // the age of this process's copy of the rows; see [PoliciesStatus]
}

// Origin says where the policy of a key comes from.
type Origin string

// A row for the key decides; without one, the row for the longest prefix, then the row for everybody, then the code.
const (
	OriginCode      Origin = "code"      // [Config].Policy, or the policy passed to With
	OriginEverybody Origin = "everybody" // a row for all keys of the limiter
	OriginPrefix    Origin = "prefix"    // a row for the keys with a prefix
	OriginKey       Origin = "key"       // a row for this key
)

// Explain says which policy is in force for a key, and why. Errors: as Peek.
func (l *Limiter) Explain(ctx context.Context, key string) (Explanation, error) {
	state, err := l.Peek(ctx, key)
	if err != nil {
		return Explanation{}, err
	}
	e := Explanation{Origin: OriginCode, Mode: string(policytable.ModeEnforce), Policy: l.policy, State: state}
	if l.view == nil {
		return e, nil
	}
	e.Age = l.policies.Status().Age
	if !l.view.Table.IsReady() { // OnFailure has answered the Peek
		return e, nil
	}
	r := l.view.Row(l.model, key)
	if beside := l.view.Shadow(l.model, key); beside != nil && (r == nil || r.Value.Mode == policytable.ModeEnforce) {
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
