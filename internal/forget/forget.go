// Package forget is what processes tell each other of keys that were given back to, granted credit or reset, so that
// denials that others remember of them are forgotten.
//
// A notification has hashes of limiters and keys, because any role may listen to it. Two keys with the same hash cost a
// statement, and no more.
package forget

import (
	"hash/fnv"
	"io"
	"strconv"
	"strings"
)

// Channel is what processes listen on.
const Channel = "rate_limit"

const prefix = "forget "

// maxPayload is how long a notification is at most. Postgres allows 7,999 bytes.
const maxPayload = 7900

// Hash is what stands for a key of a limiter.
func Hash(limiter, key string) string {
	h := fnv.New32a()
	_, _ = io.WriteString(h, limiter)
	_, _ = h.Write([]byte{0})
	_, _ = io.WriteString(h, key)
	return strconv.FormatUint(uint64(h.Sum32()), 36)
}

// Read returns the hashes in a notification. ok is false if it is about something else.
func Read(payload string) (hashes map[string]bool, ok bool) {
	list, ok := strings.CutPrefix(payload, prefix)
	if !ok {
		return nil, false
	}
	hashes = map[string]bool{}
	for hash := range strings.SplitSeq(list, " ") {
		hashes[hash] = true
	}
	return hashes, true
}

// Payloads are the notifications that tell all hashes.
func Payloads(hashes map[string]bool) func(yield func(string) bool) {
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
				text.WriteString(prefix)
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
