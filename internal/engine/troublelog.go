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

// troubleLog logs what keeps the database from deciding: a line with the cause when it begins, and one when it is over.
// There is none for each call, and none shows a key.
type troubleLog struct {
	logger *slog.Logger // nil: slog.Default, as it is when there is something to log
	begin  time.Time    // the log's clock counts from here
	queues *queues      // of the client
	shard  int          // whose troubles these are

	troubled atomic.Bool // there are troubles
	mu       sync.Mutex
	troubles map[troubleID]*trouble
}

// troubleID tells troubles apart.
type troubleID struct {
	name   string // troubleAway, troublePool, or of pg.KindOf
	limits kind   // whom troubleAway concerns
}

// trouble is what keeps the database from deciding.
type trouble struct {
	limiter     string        // whose statement failed last, if the trouble need not be everybody's
	since, last time.Duration // the first failure, and the last one
	over        time.Duration // when a statement has decided since the last failure; 0: none has
}

// Calm is how long nothing may fail until a trouble counts as over that has not opened the breaker. So what fails now
// and then has one line, too.
const Calm = 10 * time.Second

// The kinds of trouble that OnFailure answers. All others are of pg.KindOf.
const (
	troubleAway = "away"
	troublePool = "pool_exhausted"
)

// troubleOf returns the kind of trouble that an error shows, or "" if it is none of the database.
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

// note tells how a statement whose first request is r has ended, and whether that has closed the breaker.
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

// noteDecision tells that a statement for a limiter has decided, whose requests are of that kind.
func (s *troubleLog) noteDecision(limiter string, k kind, closed bool) {
	now := time.Since(s.begin)
	ended := map[troubleID]trouble{}
	s.mu.Lock()
	for id, t := range s.troubles {
		if t.limiter != "" && t.limiter != limiter { // another one may lack a right that this one has
			continue
		}
		if id.name == troubleAway && id.limits != k { // another table may be locked
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
