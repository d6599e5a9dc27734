package ratelimit

// kind is what a request needs of the database: the table, and whether its commit waits for the WAL. Each can fail
// while the others work: a table is locked or damaged, a disk is full, a standby keeps commits waiting. So requests
// of different kinds leave in different statements, and each kind has a breaker of its own.
type kind uint8

const (
	kindEphemeral kind   = iota // rate_limit_ephemeral
	kindDurable                 // rate_limit_durable
	kindFlushing                // the same, and the commit waits
	kindSeveral                 // AllowAll over several of these
	kindCount     = iota        // how many there are
)

func (k kind) String() string {
	return [kindCount]string{"ephemeral", "durable", "synchronous", "several"}[k]
}

// kind is that of all requests for these keys.
func (s *keyspace) kind() kind {
	switch {
	case !s.durable:
		return kindEphemeral
	case !s.flush:
		return kindDurable
	default:
		return kindFlushing
	}
}

func (r *request) kind() kind {
	k := r.parts[0].space.kind()
	for i := range r.parts[1:] {
		if r.parts[i+1].space.kind() != k {
			return kindSeveral
		}
	}
	return k
}
