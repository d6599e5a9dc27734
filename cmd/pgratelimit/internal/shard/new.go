package shard

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/shards"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// wantedShard is the state that a database must have to become a shard.
type wantedShard struct {
	is     Identity
	fresh  bool // whether it is allowed that the database does not know its place yet
	counts bool // whether the database may already have counts
	copies bool // whether the database may be the new shard of a division
	had    bool // whether the proxy already has the database in this place
	still  bool // whether the database is an old shard whose new shard has not taken over yet
}

// readNewShards reads databases that will become shards. The error lists the problems of each database.
func readNewShards(ctx context.Context, stores []*cli.App, want func(s *State, n int) wantedShard) ([]*State, error) {
	var states []*State
	version, token := cli.LatestVersion(), rand.Int32()
	var visit func(stores []*cli.App)
	visit = func(stores []*cli.App) { // twin needs open transactions in all databases at the same time
		if len(stores) == 0 {
			return
		}
		visited := false
		s := NewState(stores[0])
		states = append(states, s)
		if err := s.Store.LookOnce(ctx, func(tx cli.Tx) error {
			if err := s.readNew(ctx, tx, token, version); err != nil {
				return err
			}
			visited = true
			visit(stores[1:])
			return nil
		}); err != nil {
			s.cannotBeRead(err)
		}
		if !visited {
			visit(stores[1:])
		}
	}
	visit(stores)
	var wrong []error
	for _, s := range states {
		w := want(s, len(states))
		w.is.Cluster = clusterOf(states)
		s.judge(w.is, version, w.fresh)
		s.judgeNew(states, w)
		for _, f := range s.Wrong {
			wrong = append(wrong, fmt.Errorf("%s %s; %s", s.Name, f.Found, f.Do))
		}
	}
	return states, errors.Join(wrong...)
}

// readNew reads a database that will become a shard. For a new shard, more matters than what Read reads.
func (s *State) readNew(ctx context.Context, tx cli.Tx, token int32, version int64) error {
	if err := tx.QueryRow(ctx, twinSQL, token, s.Place).Scan(&s.twin); err != nil {
		return err
	}
	if err := s.Read(ctx, tx); err != nil || s.Version != version || s.ReadOnly || !s.member {
		return err
	}
	return tx.QueryRow(ctx, holdsSQL).Scan(&s.counts, &s.policies)
}

func (s *State) judgeNew(all []*State, w wantedShard) {
	if s.twin != nil && (!w.still || !s.IsStill(all[*s.twin])) {
		s.add(cli.Problem, "place", "name another database", "is the same database as %s", all[*s.twin].Name)
	}
	if s.owner != "" && !s.member {
		s.add(cli.Problem, "rights", fmt.Sprintf("run this as a role that is a member of %s on each shard",
			cli.Printable(s.owner)), "has tables of %s, and this role is not a member of that", cli.Printable(s.owner))
	}
	if s.Is != nil || s.twin != nil {
		return
	}
	switch counts := s.counts && !w.counts; {
	case s.copies() && w.copies:
	case s.copies():
		s.add(cli.Problem, "counts",
			"run `pgratelimit shard list` for the proxy of that shard, and do what it says, or "+
				"use another database; only if that growth was undone are they nobody's, and "+
				"`TRUNCATE rate_limit_ephemeral, rate_limit_durable, rate_limit_ephemeral_hold, "+
				"rate_limit_durable_hold, rate_limit_shard` loses nothing",
			"has rows of a shard that is being divided, perhaps the only ones of their keys")
	case counts && w.had:
		s.add(cli.Problem, "counts", s.become(w.is)+" if it was that shard before, and has its counts; otherwise use "+
			"another database", "has counts, and does not say which shard it is")
	case counts:
		s.add(cli.Problem, "counts", "make it the only shard, and then grow, which keeps them; or `TRUNCATE` "+
			"rate_limit_ephemeral and rate_limit_durable, which forgets all counts, if nobody asks for them",
			"has counts already, of keys that other shards would own")
	}
	if s.policies && w.is.Place > 0 {
		s.add(cli.Problem, "policies", "move them to shard 0, and `DELETE` them here",
			"has policies, and only those of shard 0 are obeyed")
	}
}

// tryShards queries each shard through PL/Proxy, in the transaction that makes the proxy. The argument owned tells
// whether the shards already know their places.
func tryShards(ctx context.Context, tx cli.Tx, states []*State, source shards.Source, owner string, owned bool) error {
	schema := pgx.Identifier{tx.Schema}.Sanitize()
	condition := "true"
	if owned {
		condition = "(SELECT " + schema + "._rate_limit_own_shard(shard, shards))"
	}
	if _, err := tx.Tx.Exec(ctx, fmt.Sprintf(checkShardSQL, schema, strings.ReplaceAll(schema, "'", "''"),
		condition)); err != nil {
		return err
	}
	// The user mapping belongs to the functions' owner.
	if _, err := tx.Tx.Exec(ctx, "SET LOCAL ROLE "+owner); err != nil {
		return err
	}
	var needed []string
	for _, f := range source.Functions {
		needed = append(needed, f.Name)
	}
	for _, s := range states {
		var login string
		var missing []string
		if err := tx.Tx.QueryRow(ctx, "SELECT login, missing FROM "+schema+"._rate_limit_check_shard($1, $2, $3)",
			s.Place, len(states), needed).Scan(&login, &missing); err != nil {
			found, do := ProxyTrouble(err)
			return s.Store.About(errors.New(found + "; " + do))
		}
		if len(missing) > 0 {
			return s.Store.About(fmt.Errorf("role %s may not execute %s; run deploy/grants.sql there, and "+
				"GRANT rate_limit_app, rate_limit_sweeper TO %[1]s", cli.Printable(login), strings.Join(missing, ", ")))
		}
	}
	if _, err := tx.Tx.Exec(ctx, "RESET ROLE"); err != nil {
		return err
	}
	_, err := tx.Tx.Exec(ctx, "DROP FUNCTION "+schema+"._rate_limit_check_shard")
	return err
}

// ProxyTrouble explains an error of PL/Proxy, and gives advice.
func ProxyTrouble(err error) (found, do string) {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return cli.OneLine(err), "look at the log of both servers"
	}
	has := func(part string) bool { return strings.Contains(pgErr.Message, part) }
	switch {
	case has("password"):
		do = PasswordVariable + " has to be the password of --user on the shard, for `pgratelimit shard set`"
	case has("role ") && has("does not exist"):
		do = "make the role on the shard: CREATE ROLE … LOGIN"
	case has("not permitted to log in"):
		do = "let the role log in: ALTER ROLE … LOGIN"
	case has("pg_hba.conf"):
		do = "let the shard's pg_hba.conf admit the host of the proxy's server"
	case has("PQconnect"):
		do = "give `pgratelimit shard set` a connection string that works from the host of the proxy's server"
	case pgErr.Code == "RLS03":
		do = "`pgratelimit shard list` says what is wrong with the place, or the growth, of each shard"
	case pgErr.Code == "42501":
		do = "run deploy/grants.sql on the shard, and GRANT rate_limit_app, rate_limit_sweeper TO the role of --user"
	default:
		do = "look at the log of both servers"
	}
	return "PL/Proxy cannot use it: " + cli.OneLine(errors.New(pgErr.Message)), do
}
