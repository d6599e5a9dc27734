// Package ratelimittest helps to test applications that use a limiter, with a database in memory instead of Postgres:
//
//	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{
//		Name:   "login",
//		Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute},
//	})
//
// The limiter behaves as on Postgres: the results, the errors, Wait, Refund, Grant, AllowAll and everything else. Only
// calls in a transaction (WithTx) are refused. The database needs no migrations and no sweeper.
//
// The clock is the clock of this process. In a bubble of testing/synctest it is the clock of the bubble, so a wait of a
// minute takes no time. [ratelimit.TestConfig] replaces the clock. Time zone data are those of this process; import
// time/tzdata to add them.
//
// Never use the database in production. It shares nothing with other processes, loses everything at a restart, and
// never deletes keys.
package ratelimittest

import (
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/memdb"
)

// NewDB returns an empty database in memory, for [ratelimit.New] and [ratelimit.NewClient]. Limiters with one name on
// the same database share their keys, as several processes do on Postgres. It is safe for concurrent use, and needs no
// Close.
func NewDB() ratelimit.DBTX { return &memdb.DB{} }
