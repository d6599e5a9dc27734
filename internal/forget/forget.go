// Package forget defines the messages about keys with a refund, a grant or a reset. Other processes then forget the
// denials that they remember of these keys.
//
// A notification contains only hashes of limiters and keys, because any role may listen to it. If two keys have the
// same hash, the only cost is one more statement.
package forget

import (
	"hash/fnv"
	"io"
	"strconv"
	"strings"
)

// Channel is the channel for these notifications.
const Channel = "rate_limit"

const prefix = "forget "

// maxPayload is the longest notification. Postgres allows 7,999 bytes.
const maxPayload = 7900

// Hash returns the hash of a limiter's key.
func Hash(limiter, key string) string {
	h := fnv.New32a()
	_, _ = io.WriteString(h, limiter)
	_, _ = h.Write([]byte{0})
	_, _ = io.WriteString(h, key)
	return strconv.FormatUint(uint64(h.Sum32()), 36)
}

// Read returns the hashes in a notification. ok is false if the notification has another subject.
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

// Payloads are the notifications for all hashes.
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
