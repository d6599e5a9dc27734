package engine

// kind is what a request needs from the database: which table, and whether the commit waits for the WAL. One kind can
// fail while other kinds work. For example, a table is locked, a disk is full, or commits wait for a standby. So
// requests of different kinds are sent in different statements, and the breaker has a state for each kind.
type kind uint8

// The kinds.
const (
	KindEphemeral kind   = iota // rate_limit_ephemeral
	KindDurable                 // rate_limit_durable
	kindFlushing                // rate_limit_durable, with a commit that waits for the WAL
	kindSeveral                 // AllowAll for keys of several kinds
	kindSlots                   // slots in both tables, with commits that wait for the WAL
	kindCount     = iota        // how many kinds there are
)

func (k kind) String() string {
	return [kindCount]string{"ephemeral", "durable", "synchronous", "several", "slots"}[k]
}

// kind returns the kind of requests for keys of s.
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
	if r.ofSlot() {
		return kindSlots
	}
	k := r.Parts[0].Space.kind()
	for i := range r.Parts[1:] {
		if r.Parts[i+1].Space.kind() != k {
			return kindSeveral
		}
	}
	return k
}
