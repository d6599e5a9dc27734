// Package ratelimittest is for unit tests of applications that use a limiter. Its database is in memory, so that the
// tests need no Postgres:
//
//	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{
//		Name:   "login",
//		Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute},
//	})
//
// It is a limiter as any other, and answers as on Postgres: the results, the errors, Wait, Refund, Grant, AllowAll and
// everything else. Only what asks in a transaction of the caller's, as WithTx does, is refused, and there is nothing
// to migrate and nothing to sweep.
//
// Time is that of this process. In a bubble of testing/synctest it is the bubble's, so a minute's wait takes no time.
// [ratelimit.TestConfig] replaces it by a clock of the test's. Time zones are those that this process has data for; the
// package time/tzdata brings it.
//
// Never use it in production. Nothing is shared with other processes, nothing survives a restart, and keys are never
// forgotten.
package ratelimittest

import (
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/memory"
)

// NewDB returns an empty database in memory, for [ratelimit.New] and [ratelimit.NewClient]. Limiters of one name on the
// same database share their keys, as those of several processes do on Postgres. It is safe for concurrent use, and
// needs no Close.
func NewDB() ratelimit.DBTX { return &memory.DB{} }
