package shards

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Identity is which shard a database is, as its row of rate_limit_shard says. The zero value is that it is none.
type Identity struct {
	Place, Shards int
	Cluster       string // a random name, the same on all shards that belong together
}

func (i Identity) String() string {
	if i.Shards == 0 {
		return "no shard"
	}
	return fmt.Sprintf("shard %d of %d", i.Place, i.Shards)
}

// Own makes a migrated database a shard. It fails if the database has another place already. Its cluster may change.
func Own(ctx context.Context, conn *pgx.Conn, schema string, want Identity) error {
	if err := prepare(ctx, conn, schema); err != nil {
		return err
	}
	is, err := ReadIdentity(ctx, conn, schema)
	if err != nil {
		return err
	}
	if is.Shards != 0 && (is.Place != want.Place || is.Shards != want.Shards) {
		return fmt.Errorf("it is %v already, and cannot be %v", is, want)
	}
	return setIdentity(ctx, conn, schema, want)
}

// Intend notes that a database is to become a shard of a cluster. If [Own] is interrupted after some of its databases,
// the note tells that the others belong to them.
func Intend(ctx context.Context, conn *pgx.Conn, schema, cluster string) error {
	if err := prepare(ctx, conn, schema); err != nil {
		return err
	}
	return markDivision(ctx, conn, schema, Intended+cluster)
}

// Intended begins the mark of a database that [Intend] has noted. Other marks are of divisions.
const Intended = "becomes a shard of "

// ReadIdentity tells which shard a database is, if it was prepared to be one.
func ReadIdentity(ctx context.Context, conn *pgx.Conn, schema string) (is Identity, err error) {
	err = conn.QueryRow(ctx, qualify("SELECT place, shards, cluster FROM {schema}.rate_limit_shard "+
		"WHERE place IS NOT NULL", schema)).Scan(&is.Place, &is.Shards, &is.Cluster)
	if errors.Is(err, pgx.ErrNoRows) {
		return Identity{}, nil
	}
	return is, err
}

// prepare makes a migrated database able to be a shard.
func prepare(ctx context.Context, conn *pgx.Conn, schema string) error {
	source, err := Read(ctx, conn, schema)
	if err != nil {
		return err
	}
	text, err := source.Shard(schema)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, text, pgx.QueryExecModeSimpleProtocol)
	return err
}

func setIdentity(ctx context.Context, conn *pgx.Conn, schema string, is Identity) error {
	_, err := conn.Exec(ctx, qualify("INSERT INTO {schema}.rate_limit_shard (place, shards, cluster) "+
		"VALUES ($1, $2, $3) ON CONFLICT (one) DO UPDATE "+
		"SET place = excluded.place, shards = excluded.shards, cluster = excluded.cluster", schema),
		is.Place, is.Shards, is.Cluster)
	return err
}

// markDivision marks a database that is no shard yet, and is to become one.
func markDivision(ctx context.Context, conn *pgx.Conn, schema, division string) error {
	_, err := conn.Exec(ctx, qualify("INSERT INTO {schema}.rate_limit_shard (division) VALUES ($1) "+
		"ON CONFLICT (one) DO UPDATE SET division = excluded.division", schema), division)
	return err
}

// readDivision returns the mark of the last division that a database was part of.
func readDivision(ctx context.Context, conn *pgx.Conn, schema string) (division string, err error) {
	err = conn.QueryRow(ctx, qualify("SELECT coalesce(max(division), '') FROM {schema}.rate_limit_shard", schema)).
		Scan(&division)
	return division, err
}
