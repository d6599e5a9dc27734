// Limits on several database servers. Each key is on one server, and this server keeps the key's limit exactly.
//
//	DATABASE_URLS="postgres://one/app postgres://two/app" go run ./examples/servers user:123
package main

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/migrations"
)

func main() {
	if len(os.Args) < 2 {
		log.Fatal("name a key, such as user:123")
	}
	ctx := context.Background()
	var pools []*pgxpool.Pool
	for url := range strings.FieldsSeq(os.Getenv("DATABASE_URLS")) {
		pool, err := pgxpool.New(ctx, url)
		if err != nil {
			log.Fatal(err)
		}
		if err := migrations.Up(ctx, pool); err != nil {
			log.Fatal(err)
		}
		pools = append(pools, pool)
	}
	limiters, err := newLimiters(pools)
	if err != nil {
		log.Fatal(err)
	}
	result, err := limiterOf(limiters, os.Args[1]).Allow(ctx, os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(result.Allowed, result.Remaining)
}

// newLimiters returns a limiter for each server. If a server is unreachable, only its limiter stops.
func newLimiters(pools []*pgxpool.Pool) (limiters []*ratelimit.Limiter, err error) {
	for _, pool := range pools {
		limiter, err := ratelimit.New(pool, ratelimit.Config{
			Name:   "api",
			Policy: ratelimit.SlidingWindow{Limit: 100, Window: time.Hour},
		})
		if err != nil {
			return nil, err
		}
		limiters = append(limiters, limiter)
	}
	if len(limiters) == 0 {
		return nil, fmt.Errorf("there is no server; name one in DATABASE_URLS")
	}
	return limiters, nil
}

// limiterOf returns the limiter for a key. All processes must find the same limiter, so they need the same servers in
// the same order.
func limiterOf(limiters []*ratelimit.Limiter, key string) *ratelimit.Limiter {
	hash := sha256.Sum256([]byte(key))
	return limiters[binary.BigEndian.Uint64(hash[:8])%uint64(len(limiters))]
}
