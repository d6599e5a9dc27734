package ratelimit

// Staleness returns a function that tells whether the policy in force for a key has changed since its last call.
func Staleness(l *Limiter, key string) func() bool { return l.staleness(key, l.model, nil) }

// These errors have no public name.
var (
	ErrNoLimiter    = errNoLimiter
	ErrOtherClient  = errOtherClient
	ErrSameKey      = errSameKey
	ErrOtherTx      = errOtherTx
	ErrAcrossShards = errAcrossShards
)

// OwnConns is the largest number of connections of an OwnPool.
const OwnConns = ownConns

// Tests call these functions directly.
var (
	PolicyForms    = policyForms
	ValidatePolicy = validatePolicy
	PublicError    = publicError
)
