package engine

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// troubleLog logs one line with the cause when the database stops deciding requests, and one line when the database
// decides again. It does not log a line for each call, and never logs keys.
type troubleLog struct {
	logger *slog.Logger // nil means slog.Default at the time of logging
	begin  time.Time    // when the clock of the log showed 0
	queues *queues
	shard  int

	troubled atomic.Bool // whether troubles has entries, readable without the mutex
	mu       sync.Mutex
	troubles map[troubleID]*trouble
}

type troubleID struct {
	name   string // troubleAway, troublePool, or a word of pg.KindOf
	limits kind   // for troubleAway: the kind of requests that fail
}

// trouble is a problem that keeps the database from deciding requests.
type trouble struct {
	limiter     string        // the limiter whose statement failed last; "" if the trouble concerns all
	since, last time.Duration // the times of the first and the last failure
	over        time.Duration // when the first statement after the last failure succeeded; 0 if none has
}

// Calm is how long statements must not fail before a trouble counts as over. So a trouble that comes and goes is logged
// only once. If the breaker closes, the trouble is over at once.
const Calm = 10 * time.Second

// The names of the troubles that OnFailure answers. All other troubles have names from pg.KindOf.
const (
	troubleAway = "away"
	troublePool = "pool_exhausted"
)

// troubleOf returns the name of the trouble behind an error. It returns "" if the error is not the database's fault.
func troubleOf(err error) string {
	switch {
	case !pg.IsTrouble(err):
		return ""
	case errors.Is(err, pg.ErrPoolExhausted):
		return troublePool
	case pg.IsAway(err):
		return troubleAway
	}
	return pg.KindOf(err)
}

// note records how a statement has ended. r is the first request of the statement. closed says whether the statement
// has closed the breaker.
func (s *troubleLog) note(r *Request, err error, closed bool) {
	limiter := r.Space.Name
	if err == nil {
		if s.troubled.Load() {
			s.noteDecision(limiter, r.kind(), closed)
		}
		return
	}
	id := troubleID{name: troubleOf(err)}
	if id.name == "" {
		return
	}
	message, level := "ratelimit: the database cannot decide until somebody mends the cause", slog.LevelError
	attributes := []slog.Attr{slog.Any("error", err)}
	switch id.name {
	case troublePool:
		message, level, limiter = "ratelimit: the pool has no connection to spare", slog.LevelWarn, ""
	case troubleAway:
		message, level, limiter = "ratelimit: Postgres is away or slow", slog.LevelWarn, ""
		id.limits = r.kind()
		attributes = append(attributes, slog.String("limits", id.limits.String()))
	}
	now := time.Since(s.begin)
	s.mu.Lock()
	t := s.troubles[id]
	begins := t == nil
	if begins {
		if s.troubles == nil {
			s.troubles = make(map[troubleID]*trouble)
		}
		t = &trouble{since: now}
		s.troubles[id] = t
		s.troubled.Store(true)
	}
	t.limiter, t.last, t.over = limiter, now, 0
	s.mu.Unlock()
	if begins {
		s.log(level, message, limiter, attributes...)
	}
}

// noteDecision records that a statement has decided requests of a kind. It logs the end of troubles that are over.
func (s *troubleLog) noteDecision(limiter string, k kind, closed bool) {
	now := time.Since(s.begin)
	ended := map[troubleID]trouble{}
	s.mu.Lock()
	for id, t := range s.troubles {
		if t.limiter != "" && t.limiter != limiter { // the other limiter's role may still lack a right
			continue
		}
		if id.name == troubleAway && id.limits != k { // the table of the other kind may still be locked
			continue
		}
		if t.over == 0 {
			t.over = now
		}
		if now-t.last >= Calm || closed && t.limiter == "" {
			ended[id] = *t
			delete(s.troubles, id)
		}
	}
	s.troubled.Store(len(s.troubles) > 0)
	s.mu.Unlock()
	for id, t := range ended {
		attributes := []slog.Attr{slog.Duration("after", t.over-t.since), slog.String("trouble", id.name)}
		if id.name == troubleAway {
			attributes = append(attributes, slog.String("limits", id.limits.String()))
		}
		s.log(slog.LevelInfo, "ratelimit: Postgres decides again", t.limiter, attributes...)
	}
}

func (s *troubleLog) log(level slog.Level, message, limiter string, attributes ...slog.Attr) {
	if limiter != "" {
		attributes = append(attributes, slog.String("limiter", limiter))
	}
	if s.queues.Shards() > 1 {
		attributes = append(attributes, slog.Int("shard", s.shard))
	}
	cmp.Or(s.logger, slog.Default()).LogAttrs(context.Background(), level, message, attributes...)
}
