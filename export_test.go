package ratelimit

// Staleness tells whether what is in force for a key has changed since it was last asked.
func Staleness(l *Limiter, key string) func() bool { return l.staleness(key, l.model, nil) }

// Errors that have no public name.
var (
	ErrNoLimiter    = errNoLimiter
	ErrOtherClient  = errOtherClient
	ErrSameKey      = errSameKey
	ErrOtherTx      = errOtherTx
	ErrAcrossShards = errAcrossShards
)

// OwnConns is how many connections a pool of OwnPool has.
const OwnConns = ownConns

// These are tested by themselves.
var (
	PolicyForms    = policyForms
	ValidatePolicy = validatePolicy
	PublicError    = publicError
)
