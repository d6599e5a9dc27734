package policytable

import (
	"context"
	"hash/fnv"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Processes that share Policies tell each other which keys had a refund, a grant or a reset. The other processes then
// forget their denials of these keys.
//
// A notification contains only hashes of limiters and keys, because any role may listen to it. If two keys have the
// same hash, the only cost is one more statement.
//
// Changes within a caller's transaction are not sent, because Postgres serializes the commits of all transactions that
// notify. The application's transactions should not wait for other commits.

// AddDenials registers a client's remembered denials, so that they are forgotten when another process says so.
func (t *Table) AddDenials(d Denials) {
	t.Mu.Lock()
	defer t.Mu.Unlock()
	if !slices.Contains(t.caches, d) {
		t.caches = append(t.caches, d)
	}
}

// forgetIf forgets the denials of the keys for which is() returns true, in all caches. It drops caches that are no
// longer in use.
func (t *Table) forgetIf(is func(limiter, key string) bool) {
	t.Mu.Lock()
	caches := slices.Clone(t.caches)
	t.Mu.Unlock()
	for _, c := range caches {
		if !c.ForgetIf(is) {
			t.Mu.Lock()
			t.caches = slices.DeleteFunc(t.caches, func(other Denials) bool { return other == c })
			t.Mu.Unlock()
		}
	}
}

// Given tells other processes that a limiter's key had a refund, a grant or a reset.
func (t *Table) Given(limiter, key string) {
	t.Mu.Lock()
	if t.Running {
		if t.given == nil {
			t.given = make(map[string]bool)
		}
		t.given[KeyHash(limiter, key)] = true
	}
	t.Mu.Unlock()
	select {
	case t.Telling <- struct{}{}:
	default:
	}
}

// tell sends the keys in t.given to other processes, at most four times a second. It returns when the context ends.
func (t *Table) tell(ctx context.Context) {
	failing := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.Telling:
		}
		t.Mu.Lock()
		given := t.given
		t.given = nil
		t.Mu.Unlock()
		for payload := range ForgetPayloads(given) {
			switch err := t.notify(ctx, payload); {
			case ctx.Err() != nil:
				return
			case err == nil:
				failing = ""
			case pg.KindOf(err) != failing:
				failing = pg.KindOf(err)
				t.log(ctx, slog.LevelWarn, "ratelimit: other processes cannot be told to forget denials, which end "+
					"by their age; further failures are not logged until it works again", slog.Any("error", err))
			}
		}
		sleep(ctx, gatherTime)
	}
}

// hearForgotten forgets the denials that the payloads of notifications name. It looks at each denial once, for any
// number of notifications.
func (t *Table) hearForgotten(payloads []string) {
	all := map[string]bool{}
	for _, payload := range payloads {
		if hashes, ok := ReadForget(payload); ok {
			maps.Copy(all, hashes)
		}
	}
	if len(all) > 0 {
		t.forgetIf(func(limiter, key string) bool { return all[KeyHash(limiter, key)] })
	}
}

// forgetPrefix begins the notifications about denials to forget.
const forgetPrefix = "forget "

// maxPayload is the longest notification. Postgres allows 7,999 bytes.
const maxPayload = 7900

// KeyHash returns the hash of a limiter's key.
func KeyHash(limiter, key string) string {
	h := fnv.New32a()
	_, _ = io.WriteString(h, limiter)
	_, _ = h.Write([]byte{0})
	_, _ = io.WriteString(h, key)
	return strconv.FormatUint(uint64(h.Sum32()), 36)
}

// ReadForget returns the hashes in a notification. The result ok is false if the notification has another subject.
func ReadForget(payload string) (hashes map[string]bool, ok bool) {
	list, ok := strings.CutPrefix(payload, forgetPrefix)
	if !ok {
		return nil, false
	}
	hashes = map[string]bool{}
	for hash := range strings.SplitSeq(list, " ") {
		hashes[hash] = true
	}
	return hashes, true
}

// ForgetPayloads yields the notifications for all hashes.
func ForgetPayloads(hashes map[string]bool) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		var text strings.Builder
		for hash := range hashes {
			if text.Len()+1+len(hash) > maxPayload {
				if !yield(text.String()) {
					return
				}
				text.Reset()
			}
			if text.Len() == 0 {
				text.WriteString(forgetPrefix)
			} else {
				text.WriteByte(' ')
			}
			text.WriteString(hash)
		}
		if text.Len() > 0 {
			yield(text.String())
		}
	}
}
