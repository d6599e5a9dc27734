// Package shardkey computes the shard of a key.
package shardkey

import (
	"crypto/sha256"
	"encoding/binary"
	"strings"
)

// Tag returns the part of a key that determines its shard: the text in the first braces if it is not empty, as in Redis
// Cluster. Otherwise it is the whole key. So {user:1}:minute and {user:1}:day are on the same shard.
func Tag(key string) string {
	_, rest, opened := strings.Cut(key, "{")
	if tag, _, closed := strings.Cut(rest, "}"); opened && closed && tag != "" {
		return tag
	}
	return key
}

// Of returns the shard of a key, counted from 0. The number of shards is a power of two. _rate_limit_shard does the
// same in the database. When the number of shards doubles, each new shard gets keys of only one old shard: shard 1 of 4
// has keys of shard 1 of 2.
func Of(key string, shards int) int {
	sum := sha256.Sum256([]byte(Tag(key)))
	return int(binary.BigEndian.Uint32(sum[:]) & uint32(shards-1))
}

// Valid tells whether this number of shards is allowed.
func Valid(shards int) bool { return shards >= 2 && shards <= 1024 && shards&(shards-1) == 0 }
