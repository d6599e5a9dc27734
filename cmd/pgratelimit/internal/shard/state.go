package shard

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/shards"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// FarClocks is how far the clocks of two shards may differ without a warning. A decision depends on one clock only, but
// policies begin and end by the first shard's clock.
const FarClocks = 100 * time.Millisecond

var (
	//go:embed sql/map.sql
	MapSQL string
	//go:embed sql/state.sql
	stateSQL string
	//go:embed sql/holds.sql
	holdsSQL string
)

// State is the state of a proxy's shard.
type State struct {
	Place      int           `json:"place"`
	Connection string        `json:"connection"`
	Is         *Identity     `json:"is"`        // null if the database is not a shard
	Version    int64         `json:"version"`   // the version of the migrations; 0 if there are none
	ReadOnly   bool          `json:"read_only"` //
	Rows       int64         `json:"rows"`      // an estimate of the number of keys
	ClockUS    int64         `json:"clock_us"`  // how far the clock is ahead of the proxy's clock
	Wrong      []cli.Finding `json:"wrong"`     // [] if nothing is wrong
	Store      *cli.App      `json:"-"`         // the way to the shard
	Still      string        `json:"-"`         // the name of the old shard that is still in this place; see IsStill
	Name       string        // the shard's name for people
	encoding   string        //
	owner      string        // the owner of the tables
	member     bool          // whether this role is a member of the owner
	Clock      ClockTime     //
	Reached    bool          //
	proxy      bool          // whether the database is itself a proxy
	counts     bool          // whether the database has counts; only 'shard set' reads it
	policies   bool          // whether the database has policies; only 'shard set' reads it
	twin       *int          // the place of an earlier shard in the same database; only 'shard set' reads it
	division   string        // the mark in rate_limit_shard; see markDivision
	noting     bool          // whether the database records deleted rows, as during a division
	divider    int           // the process id of the session that divides the shards now; only the first shard has it
}

// Identity is the row of rate_limit_shard.
type Identity struct {
	Place   int    `json:"place"`
	Shards  int    `json:"shards"`
	Cluster string `json:"cluster"` // all shards of a cluster have the same name
}

func (i *Identity) String() string {
	if i == nil {
		return shards.Identity{}.String()
	}
	return shards.Identity(*i).String()
}

// ClockTime is how far a server's clock is ahead of this process's clock.
type ClockTime struct{ ahead, error time.Duration }

func readClock(ctx context.Context, tx cli.Tx) (ClockTime, error) {
	var at time.Time
	before := time.Now()
	err := tx.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&at)
	half := time.Since(before) / 2
	return ClockTime{at.Sub(before.Add(half)), half}, err
}

// ProxyState is the state of a proxy.
type ProxyState struct {
	Shards  int // the number of shards that the proxy's functions know
	Version int64
	clock   ClockTime
	Growth  *shards.Growth // nil if the shards are not being divided
}

// NewState returns the state of a shard that has not been read yet.
func NewState(a *cli.App) *State {
	return &State{Place: a.Place, Connection: a.Connection, Wrong: []cli.Finding{}, Store: a, Name: a.ShardName()}
}

// Ahead returns how many milliseconds the shard's clock is ahead of the proxy's clock.
func (s *State) Ahead() int64 {
	return (time.Duration(s.ClockUS) * time.Microsecond).Round(time.Millisecond).Milliseconds()
}

// Read reads a shard's state.
func (s *State) Read(ctx context.Context, tx cli.Tx) (err error) {
	if s.Clock, err = readClock(ctx, tx); err != nil {
		return err
	}
	var readable bool
	if err := tx.QueryRow(ctx, stateSQL, shards.GrowLock).Scan(&s.Version, &s.ReadOnly, &s.encoding, &s.Rows, &s.owner,
		&s.member, &readable, &s.proxy, &s.noting, &s.divider); err != nil {
		return err
	}
	if s.Reached = true; !readable {
		return nil
	}
	var is Identity
	err = tx.QueryRow(ctx, "SELECT coalesce(place, 0), coalesce(shards, 0), coalesce(cluster, ''), "+
		"coalesce(division, '') FROM rate_limit_shard").Scan(&is.Place, &is.Shards, &is.Cluster, &s.division)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	if is.Shards > 0 {
		s.Is = &is
	}
	return err
}

// readStore connects to the shard, and reads its state.
func (s *State) readStore(ctx context.Context) error {
	return s.Store.LookOnce(ctx, func(tx cli.Tx) error { return s.Read(ctx, tx) })
}

// copies tells whether a database has copies of a shard's rows, but is not a shard yet.
func (s *State) copies() bool {
	return s.Is == nil && s.division != "" && !strings.HasPrefix(s.division, shards.Intended)
}

// Divides tells whether a database is a shard that is being divided, or gets keys of such a shard.
func (s *State) Divides() bool {
	return s.noting || s.division != "" && !strings.HasPrefix(s.division, shards.Intended)
}

func (s *State) add(l cli.Level, check, do, found string, args ...any) {
	s.Wrong = append(s.Wrong, l.Finding(do, found, args...).Of(check))
}

func (s *State) cannotBeRead(err error) {
	if s.Reached {
		s.add(cli.Problem, "state", "mend what it says", "could not be looked at: %s", cli.OneLine(err))
		return
	}
	s.add(cli.Problem, "connection", "start it, or correct its connection string with `pgratelimit shard set`, or the "+
		"rights of this role", "cannot be reached: %s", cli.OneLine(err))
}

// judge finds a shard's problems. The argument version is the proxy's version. A fresh shard need not know its place.
func (s *State) judge(want Identity, version int64, fresh bool) {
	if !s.Reached {
		return
	}
	migrate := fmt.Sprintf("run `pgratelimit migrate up --schema %s` there", s.Store.Schema)
	switch {
	case s.proxy:
		s.add(cli.Problem, "version", "name the databases that have its limits", "is a proxy of shards itself")
	case s.Version == 0:
		s.add(cli.Problem, "version", migrate+", and deploy/grants.sql, or name another schema with --schema",
			"is not migrated in schema %s", cli.Printable(s.Store.Schema))
	case s.Version < version:
		s.add(cli.Problem, "version", migrate+", then deploy/grants.sql, and `pgratelimit shard set` for the proxy",
			"is at version %d, and should be at %d", s.Version, version)
	case s.Version > version && fresh:
		s.add(cli.Problem, "version", "run the `pgratelimit` of that release", "is at version %d, which this command, "+
			"of %d, does not know", s.Version, version)
	case s.Version > version:
		s.add(cli.Problem, "version", "migrate all shards, then run `pgratelimit shard set` for the proxy",
			"is at version %d, and the proxy's functions are of %d", s.Version, version)
	}
	if s.ReadOnly {
		s.add(cli.Problem, "writes", "name the primary in its connection string, or mend default_transaction_read_only",
			"can only be read")
	}
	if s.encoding != "UTF8" {
		s.add(cli.Problem, "encoding", "make the database anew: `CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0`",
			"has the encoding %s, and not UTF8", s.encoding)
	}
	switch {
	case s.Is == nil && !fresh:
		s.add(cli.Problem, "place",
			"if it is empty, run `pgratelimit shard set`, and its keys count from nothing; if it "+
				"was that shard before and has its counts, "+s.become(want),
			"does not say which shard it is, and should be %v", &want)
	case s.Is != nil && s.Is.Cluster != want.Cluster && s.Is.Place == want.Place && s.Is.Shards == want.Shards:
		s.add(cli.Problem, "place",
			"compare `pgratelimit shard list` of all proxies, and `pgratelimit shard set` those "+
				"that have a wrong database; if `pgratelimit shard set` was interrupted, run it again",
			"belongs to another set of shards than the first shards here")
	case s.Is != nil && *s.Is != want:
		s.add(cli.Problem, "place", s.rightPlace(want), "is %v, and not %v", s.Is, &want)
	}
}

// become returns the statement that turns a database back into the shard that it was.
func (s *State) become(is Identity) string {
	return fmt.Sprintf("`INSERT INTO %s.rate_limit_shard (place, shards, cluster) VALUES (%d, %d, '%s')`",
		pgx.Identifier{s.Store.Schema}.Sanitize(), is.Place, is.Shards, strings.ReplaceAll(is.Cluster, "'", "''"))
}

// rightPlace returns advice for a shard that has a wrong place.
func (s *State) rightPlace(want Identity) string {
	switch {
	case s.noting || s.Is.Shards == 2*want.Shards && s.Is.Place%want.Shards == want.Place:
		return "it is divided, or was, for another proxy: run `pgratelimit shard list` for that one, and do what it " +
			"says; then `pgratelimit shard grow` here with the same new shards, or there with --proxy for this one. " +
			"Nothing is lost meanwhile"
	case 2*s.Is.Shards == want.Shards && s.Is.Place == want.Place%s.Is.Shards:
		return "if `pgratelimit shard grow` was interrupted, run it again as before; otherwise give the connection " +
			"strings of all shards that there are, and let `pgratelimit shard grow` double their number"
	}
	return "give the connection strings in the order of the shards' places. If no proxy uses this database any more, " +
		"`DROP TABLE rate_limit_shard` in it makes it no shard: its counts stay, and calls of a proxy that still " +
		"uses it fail"
}

// judgeGrowth says how far the division of each old shard has come, and how to continue.
func judgeGrowth(a *cli.App, states []*State, growth *shards.Growth) {
	half := len(states) / 2
	moved, ended := false, true
	do := "run " + a.Command("shard grow") + " again, which continues from there"
	if growth.Proxies > 1 {
		do += ", with --proxy for " + cli.Count(growth.Proxies-1, "other proxy")
	}
	for _, s := range states[:half] {
		moved = moved || s.Is == nil || s.Is.Shards != half
	}
	if !moved {
		do += "; or take it back, since no key has moved yet: " + a.Command("shard grow --undo")
	}
	if pid := states[0].divider; pid != 0 {
		do = fmt.Sprintf("wait for the end of `pgratelimit shard grow`, which works now, as process %d of shard 0", pid)
	}
	for i, s := range states[:half] {
		l := cli.Warning
		var found string
		switch {
		case s.Is == nil: // judge says why
			continue
		case s.Is.Shards == half:
			found = "is to be divided, and still has all its keys"
		case states[half+i].Connection == s.Connection:
			l, found = cli.Problem, "has given up half of its keys, and nobody decides these until the growth goes on"
		case s.division != "":
			found = fmt.Sprintf("has given half of its keys to shard %d, and still has their rows", half+i)
		case i == half-1 && ended:
			found = "has been divided, like all others, and nothing says yet that the growth is over"
		default:
			continue
		}
		ended = false
		s.add(l, "growth", do, "%s", found)
	}
}

// JudgeClock adds a warning if the shard's clock differs by more than FarClocks from the proxy's clock.
func (s *State) JudgeClock(proxy ClockTime) {
	if !s.Reached {
		return
	}
	apart := s.Clock.ahead - proxy.ahead
	s.ClockUS = apart.Microseconds()
	if apart.Abs()-s.Clock.error-proxy.error > FarClocks {
		s.add(cli.Warning, "clock", "let NTP keep the clocks of all servers", "has a clock that is %v from the proxy's",
			apart.Round(time.Millisecond))
	}
}

// States reads the states of a proxy and of its shards at the same time. A shard that does not answer is no error.
func States(ctx context.Context, db cli.DB) (p ProxyState, states []*State, err error) {
	all, err := db.Shards(ctx)
	if err != nil || len(all) == 0 {
		return p, nil, err
	}
	if err := db.Look(ctx, func(tx cli.Tx) error {
		if err := tx.QueryRow(ctx, MapSQL).Scan(&p.Shards, &p.Version); err != nil {
			return err
		}
		if p.Growth, err = shards.ReadGrowth(ctx, tx); err == nil {
			p.clock, err = readClock(ctx, tx)
		}
		return err
	}); err != nil {
		return p, nil, err
	}
	var reading sync.WaitGroup
	for _, shard := range all {
		s := NewState(shard)
		states = append(states, s)
		reading.Go(func() {
			if err := s.readStore(ctx); err != nil {
				s.cannotBeRead(err)
			}
		})
	}
	reading.Wait()
	cluster := clusterOf(states)
	for i, s := range states {
		old := states[i%max(len(all)/2, 1)]
		s.JudgeClock(p.clock)
		if p.Growth != nil && s.IsStill(old) {
			s.Still, s.Wrong = old.Name, []cli.Finding{} // the problems belong to the old shard
			continue
		}
		want := Identity{i, len(all), cluster}
		if p.Growth != nil && s == old && s.Is != nil && s.Is.Shards == len(all)/2 {
			want.Shards = len(all) / 2
		}
		s.judge(want, p.Version, false)
		if p.Growth == nil && s.noting && s.Is != nil && *s.Is == want {
			s.add(cli.Warning, "growth", s.rightPlace(want), "is being divided, for another proxy")
		}
	}
	if p.Growth != nil {
		judgeGrowth(db.App, states, p.Growth)
	}
	return p, states, ctx.Err()
}

// IsStill tells whether a place still has its old shard during a division.
func (s *State) IsStill(old *State) bool { return s != old && s.Connection == old.Connection }

// clusterOf returns the cluster of the first database that is a shard.
func clusterOf(states []*State) string {
	for _, s := range states {
		if s.Is != nil {
			return s.Is.Cluster
		}
	}
	return ""
}
