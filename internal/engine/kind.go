package engine

// kind is what a request needs of the database: which table, and whether its commit waits for the WAL. One kind can
// fail while the others work: a table is locked or damaged, a disk is full, or a standby keeps commits waiting. So
// requests of different kinds leave in different statements, and each kind has a breaker of its own.
type kind uint8

// The kinds.
const (
	KindEphemeral kind   = iota // rate_limit_ephemeral
	KindDurable                 // rate_limit_durable
	kindFlushing                // rate_limit_durable, and the commit waits for the WAL
	kindSeveral                 // AllowAll over several of these
	kindCount     = iota        // how many there are
)

func (k kind) String() string {
	return [kindCount]string{"ephemeral", "durable", "synchronous", "several"}[k]
}

// kind is the kind of requests for these keys.
func (s *Space) kind() kind {
	switch {
	case !s.Durable:
		return KindEphemeral
	case !s.Flush:
		return KindDurable
	default:
		return kindFlushing
	}
}

func (r *Request) kind() kind {
	k := r.Parts[0].Space.kind()
	for i := range r.Parts[1:] {
		if r.Parts[i+1].Space.kind() != k {
			return kindSeveral
		}
	}
	return k
}
