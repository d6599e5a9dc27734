package main

import (
	"context"
	_ "embed"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/shards"
)

// farClocks is how far apart clocks may be before somebody should hear of it. A key is on one shard, so no decision
// depends on two clocks. But a policy begins and ends by the clock of the first shard.
const farClocks = 100 * time.Millisecond

var (
	//go:embed sql/shard/map.sql
	mapSQL string
	//go:embed sql/shard/state.sql
	stateSQL string
	//go:embed sql/shard/holds.sql
	holdsSQL string
)

// shardState is what a shard of a proxy says of itself.
type shardState struct {
	Place      int       `json:"place"`
	Connection string    `json:"connection"`
	Is         *shardIs  `json:"is"`        // null if the database is no shard
	Version    int64     `json:"version"`   // of the migrations; 0 if there are none
	ReadOnly   bool      `json:"read_only"` //
	Rows       int64     `json:"rows"`      // of keys, estimated
	ClockUS    int64     `json:"clock_us"`  // ahead of the clock of the proxy
	Wrong      []finding `json:"wrong"`     // [] if nothing is
	name       string    // for people
	schema     string    // of the tables and functions
	encoding   string    //
	owner      string    // of the tables
	member     bool      // this role is a member of that
	clock      clockTime //
	reached    bool      //
	proxy      bool      // it is one itself
	counts     bool      // there are some; only read for set
	policies   bool      // as above
	twin       *int      // the place of a shard before this one that is the same database; as above
}

// shardIs is the row of rate_limit_shard.
type shardIs struct {
	Place   int    `json:"place"`
	Shards  int    `json:"shards"`
	Cluster string `json:"cluster"` // the same on all shards that belong together
}

func (i *shardIs) String() string {
	if i == nil {
		return shards.Identity{}.String()
	}
	return shards.Identity(*i).String()
}

// clockTime is how far a server's clock is ahead of ours.
type clockTime struct{ ahead, error time.Duration }

func readClock(ctx context.Context, tx pgx.Tx) (clockTime, error) {
	var at time.Time
	before := time.Now()
	err := tx.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&at)
	half := time.Since(before) / 2
	return clockTime{at.Sub(before.Add(half)), half}, err
}

// proxyState is what a proxy says of itself.
type proxyState struct {
	shards  int // that its functions know
	version int64
	clock   clockTime
}

func readProxyState(ctx context.Context, tx pgx.Tx) (p proxyState, err error) {
	if err = tx.QueryRow(ctx, mapSQL).Scan(&p.shards, &p.version); err == nil {
		p.clock, err = readClock(ctx, tx)
	}
	return p, err
}

// newState returns the state of a shard of which nothing is known yet.
func (a *app) newState() shardState {
	return shardState{
		Place: a.place, Connection: a.connection, Wrong: []finding{}, name: a.shardName(), schema: a.schema,
	}
}

// read asks a shard.
func (s *shardState) read(ctx context.Context, tx pgx.Tx) (err error) {
	if s.clock, err = readClock(ctx, tx); err != nil {
		return err
	}
	var readable bool
	if err := tx.QueryRow(ctx, stateSQL).Scan(
		&s.Version, &s.ReadOnly, &s.encoding, &s.Rows, &s.owner, &s.member, &readable, &s.proxy); err != nil {
		return err
	}
	if s.reached = true; !readable {
		return nil
	}
	rows, err := tx.Query(ctx, "SELECT place, shards, cluster FROM rate_limit_shard WHERE place IS NOT NULL")
	if err != nil {
		return err
	}
	all, err := pgx.CollectRows(rows, pgx.RowToAddrOfStructByPos[shardIs])
	if len(all) > 0 {
		s.Is = all[0]
	}
	return err
}

func (s *shardState) add(l level, check, do, found string, args ...any) {
	f := l.finding(do, found, args...)
	f.Check = check
	s.Wrong = append(s.Wrong, f)
}

func (s *shardState) cannotBeRead(err error) {
	if s.reached {
		s.add(problem, "state", "mend what it says", "could not be looked at: %s", oneLine(err))
		return
	}
	s.add(problem, "connection", "start it, or correct its connection string with `pgratelimit shard set`, or the "+
		"rights of this role", "cannot be reached: %s", oneLine(err))
}

// judge finds what is wrong with a shard for a proxy with functions of a version. A new one need not know its place.
func (s *shardState) judge(want shardIs, version int64, fresh bool) {
	if !s.reached {
		return
	}
	migrate := fmt.Sprintf("run `pgratelimit migrate up --schema %s` there", s.schema)
	switch {
	case s.proxy:
		s.add(problem, "version", "name the databases that have its limits", "is a proxy of shards itself")
	case s.Version == 0:
		s.add(problem, "version", migrate+", and deploy/grants.sql, or name another schema with --schema",
			"is not migrated in schema %s", printable(s.schema))
	case s.Version < version:
		s.add(problem, "version", migrate+", then deploy/grants.sql, and `pgratelimit shard set` for the proxy",
			"is at version %d, and should be at %d", s.Version, version)
	case s.Version > version && fresh:
		s.add(problem, "version", "run the `pgratelimit` of that release", "is at version %d, which this command, "+
			"of %d, does not know", s.Version, version)
	case s.Version > version:
		s.add(problem, "version", "migrate all shards, then run `pgratelimit shard set` for the proxy",
			"is at version %d, and the proxy's functions are of %d", s.Version, version)
	}
	if s.ReadOnly {
		s.add(problem, "writes", "name the primary in its connection string, or mend default_transaction_read_only",
			"can only be read")
	}
	if s.encoding != "UTF8" {
		s.add(problem, "encoding", "make the database anew: `CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0`",
			"has the encoding %s, and not UTF8", s.encoding)
	}
	switch {
	case s.Is == nil && !fresh:
		s.add(problem, "place", fmt.Sprintf("run `pgratelimit shard set`; or, if it was that shard before and has its "+
			"counts, `INSERT INTO %s.rate_limit_shard (place, shards, cluster) VALUES (%d, %d, '%s')`",
			pgx.Identifier{s.schema}.Sanitize(), want.Place, want.Shards, strings.ReplaceAll(want.Cluster, "'", "''")),
			"does not say which shard it is, and should be %v", &want)
	case s.Is != nil && s.Is.Cluster != want.Cluster && s.Is.Place == want.Place && s.Is.Shards == want.Shards:
		s.add(problem, "place", "compare `pgratelimit shard list` of all proxies, and `pgratelimit shard set` those "+
			"that have a wrong database", "belongs to other shards than the first ones of these")
	case s.Is != nil && *s.Is != want:
		s.add(problem, "place", "give the connection strings in the order of the shards' places; for a database that "+
			"no proxy uses any more, drop rate_limit_shard in it", "is %v, and not %v", s.Is, &want)
	}
}

// judgeClock finds a clock that is not that of the proxy.
func (s *shardState) judgeClock(proxy clockTime) {
	if !s.reached {
		return
	}
	apart := s.clock.ahead - proxy.ahead
	s.ClockUS = apart.Microseconds()
	if apart.Abs()-s.clock.error-proxy.error > farClocks {
		s.add(warning, "clock", "let NTP keep the clocks of all servers", "has a clock %v from that of the proxy",
			apart.Round(time.Millisecond))
	}
}

// shardStates asks a proxy and all its shards at the same time. One that does not answer is no error.
func (a *app) shardStates(ctx context.Context, pool *pgxpool.Pool) (p proxyState, states []shardState, err error) {
	all, err := a.shards(ctx, pool)
	if err != nil || len(all) == 0 {
		return p, nil, err
	}
	if err := a.look(ctx, pool, func(tx pgx.Tx) error {
		p, err = readProxyState(ctx, tx)
		return err
	}); err != nil {
		return p, nil, err
	}
	states = make([]shardState, len(all))
	var reading sync.WaitGroup
	for i, shard := range all {
		reading.Go(func() {
			s := shard.newState()
			if err := shard.inShard(ctx, func(pool *pgxpool.Pool) error {
				return shard.look(ctx, pool, func(tx pgx.Tx) error { return s.read(ctx, tx) })
			}); err != nil {
				s.cannotBeRead(err)
			}
			states[i] = s
		})
	}
	reading.Wait()
	cluster := clusterOf(states)
	for i := range states {
		states[i].judge(shardIs{i, len(all), cluster}, p.version, false)
		states[i].judgeClock(p.clock)
	}
	return p, states, ctx.Err()
}

// clusterOf is the cluster of the first shard that is one.
func clusterOf(states []shardState) string {
	for i := range states {
		if states[i].Is != nil {
			return states[i].Is.Cluster
		}
	}
	return ""
}

// inShard calls do with a pool.
func (a *app) inShard(ctx context.Context, do func(*pgxpool.Pool) error) error {
	pool, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	return do(pool)
}
