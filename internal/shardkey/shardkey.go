// Package shardkey computes the shard of a key.
package shardkey

import (
	"crypto/sha256"
	"encoding/binary"
	"strings"
)

// Tag returns the part of a key that determines the key's shard. The tag is the text in the first pair of braces, as in
// Redis Cluster, so {user:1}:minute and {user:1}:day are on the same shard. If there is no text in braces, the tag is
// the whole key.
func Tag(key string) string {
	_, rest, opened := strings.Cut(key, "{")
	if tag, _, closed := strings.Cut(rest, "}"); opened && closed && tag != "" {
		return tag
	}
	return key
}

// Of returns the shard of a key, counted from 0. The number of shards must be a power of two. The SQL function
// _rate_limit_shard computes the same number. When n shards become 2n, shard i gets only keys that were on shard i % n.
func Of(key string, shards int) int { return int(Number(key) & uint32(shards-1)) }

// Number returns the number whose last bits are the shard of a key. The id of a hold ends with its last 16 bits.
func Number(key string) uint32 {
	sum := sha256.Sum256([]byte(Tag(key)))
	return binary.BigEndian.Uint32(sum[:])
}

// Valid tells whether a cluster may have this number of shards.
func Valid(shards int) bool { return shards >= 2 && shards <= 1024 && shards&(shards-1) == 0 }
