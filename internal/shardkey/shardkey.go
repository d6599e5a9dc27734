// Package shardkey tells on which shard a key is.
package shardkey

import (
	"crypto/sha256"
	"encoding/binary"
	"strings"
)

// Tag returns the part of a key that decides on which shard it is: what is in the first braces, if there is something,
// as in Redis Cluster. Otherwise it is the whole key. So {user:1}:minute and {user:1}:day are on one shard.
func Tag(key string) string {
	_, rest, opened := strings.Cut(key, "{")
	if tag, _, closed := strings.Cut(rest, "}"); opened && closed && tag != "" {
		return tag
	}
	return key
}

// Of returns the shard of a key, from 0. The number of shards is a power of two. _rate_limit_shard does the same in the
// database. Where there are twice as many shards, each has keys of one of those before: shard 1 of 4 has keys of shard
// 1 of 2.
func Of(key string, shards int) int {
	sum := sha256.Sum256([]byte(Tag(key)))
	return int(binary.BigEndian.Uint32(sum[:]) & uint32(shards-1))
}

// Valid tells whether there can be so many shards.
func Valid(shards int) bool { return shards >= 2 && shards <= 1024 && shards&(shards-1) == 0 }
