package envoy

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
)

// limiterName returns the name of a domain's limiter: see ratelimit.Config.
func limiterName(domain string) string { return "envoy:" + domain }

const maxKey = 512 // bytes; the most that the library accepts

// keyOf returns the key that counts entries in windows of a unit, such as "tenant=t1,path=/export hour". Different
// entries or units have different keys, because all characters that part them are escaped. A key above 512 bytes is
// replaced by its SHA-256, such as "sha256:2c26… hour". It has no =, so it is no other key.
func keyOf(entries []entry, unit pb.RateLimitResponse_RateLimit_Unit) string {
	var key strings.Builder
	for i, e := range entries {
		if i > 0 {
			key.WriteByte(',')
		}
		escape(&key, e.key)
		key.WriteByte('=')
		escape(&key, e.value)
	}
	key.WriteByte(' ')
	key.WriteString(strings.ToLower(unit.String()))
	if key.Len() <= maxKey {
		return key.String()
	}
	sum := sha256.Sum256([]byte(key.String()))
	return "sha256:" + hex.EncodeToString(sum[:]) + " " + strings.ToLower(unit.String())
}

// escape writes text with %XX for control characters, which a terminal or Postgres may not bear, and for the characters
// that have a meaning in a key.
func escape(to *strings.Builder, text string) {
	const digits = "0123456789ABCDEF"
	for i := range len(text) {
		switch b := text[i]; {
		case b < ' ' || b == 0x7F || b == '%' || b == '=' || b == ',':
			to.WriteByte('%')
			to.WriteByte(digits[b>>4])
			to.WriteByte(digits[b&15])
		default:
			to.WriteByte(b)
		}
	}
}
