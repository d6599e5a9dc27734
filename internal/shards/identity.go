package shards

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Identity is a shard's row of rate_limit_shard. The zero value means that the database is not a shard.
type Identity struct {
	Place, Shards int
	Cluster       string // a random name that all shards of a cluster have
}

func (i Identity) String() string {
	if i.Shards == 0 {
		return "no shard"
	}
	return fmt.Sprintf("shard %d of %d", i.Place, i.Shards)
}

// Own turns a migrated database into a shard. Own fails if the database is a shard with another place.
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

// Intend records that a database will become a shard of a cluster. If [Own] is interrupted, the record shows which
// databases belong to the cluster.
func Intend(ctx context.Context, conn *pgx.Conn, schema, cluster string) error {
	if err := prepare(ctx, conn, schema); err != nil {
		return err
	}
	return markDivision(ctx, conn, schema, Intended+cluster)
}

// Intended begins the mark that [Intend] writes. Marks of divisions do not begin with Intended.
const Intended = "becomes a shard of "

// ReadIdentity returns which shard a database is. ReadIdentity returns the zero Identity if the database is not a
// shard.
func ReadIdentity(ctx context.Context, conn *pgx.Conn, schema string) (is Identity, err error) {
	err = conn.QueryRow(ctx, qualify("SELECT place, shards, cluster FROM {schema}.rate_limit_shard "+
		"WHERE place IS NOT NULL", schema)).Scan(&is.Place, &is.Shards, &is.Cluster)
	if errors.Is(err, pgx.ErrNoRows) {
		return Identity{}, nil
	}
	return is, err
}

// prepare creates the tables and functions that a shard needs in a migrated database.
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

// markDivision writes the mark of a division into a database that will become a shard.
func markDivision(ctx context.Context, conn *pgx.Conn, schema, division string) error {
	_, err := conn.Exec(ctx, qualify("INSERT INTO {schema}.rate_limit_shard (division) VALUES ($1) "+
		"ON CONFLICT (one) DO UPDATE SET division = excluded.division", schema), division)
	return err
}

// readDivision returns the mark of the database's last division.
func readDivision(ctx context.Context, conn *pgx.Conn, schema string) (division string, err error) {
	err = conn.QueryRow(ctx, qualify("SELECT coalesce(max(division), '') FROM {schema}.rate_limit_shard", schema)).
		Scan(&division)
	return division, err
}
