// Package ratelimittest helps to test applications that use a limiter, with a database in memory instead of Postgres:
//
//	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{
//		Name:   "login",
//		Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute},
//	})
//
// The limiter answers as on Postgres: the results, the errors, Wait, Refund, Grant, AllowAll and everything else. Only
// calls in the caller's transaction, as by WithTx, are refused. There is nothing to migrate and nothing to sweep.
//
// The clock is this process's. In a bubble of testing/synctest it is the bubble's, so a minute's wait takes no time.
// [ratelimit.TestConfig] replaces it by the test's own clock. Time zone data come from this process; the package
// time/tzdata adds them.
//
// Never use it in production. Nothing is shared with other processes, nothing survives a restart, and keys are never
// forgotten.
package ratelimittest

import (
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/memdb"
)

// NewDB returns an empty database in memory, for [ratelimit.New] and [ratelimit.NewClient]. Limiters with one name on
// the same database share their keys, as several processes do on Postgres. It is safe for concurrent use, and needs no
// Close.
func NewDB() ratelimit.DBTX { return &memdb.DB{} }
