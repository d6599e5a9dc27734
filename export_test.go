package ratelimit

// Staleness tells whether what is in force for a key has changed since it was last asked.
func Staleness(l *Limiter, key string) func() bool { return l.staleness(key, l.model, nil) }
