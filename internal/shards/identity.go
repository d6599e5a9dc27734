package shards

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Identity is which shard a database is, as its row of rate_limit_shard says. The zero value is that it is none.
type Identity struct{ Place, Shards int }

func (i Identity) String() string {
	if i.Shards == 0 {
		return "no shard"
	}
	return fmt.Sprintf("shard %d of %d", i.Place, i.Shards)
}

// Own makes a migrated database the shard of a place. It fails if the database is another one already.
func Own(ctx context.Context, conn *pgx.Conn, schema string, place, shards int) error {
	if err := prepare(ctx, conn, schema); err != nil {
		return err
	}
	switch is, err := ReadIdentity(ctx, conn, schema); {
	case err != nil:
		return err
	case is == Identity{}:
		return setIdentity(ctx, conn, schema, Identity{place, shards})
	case is != Identity{place, shards}:
		return fmt.Errorf("it is %v already, and cannot be %v", is, Identity{place, shards})
	}
	return nil
}

// ReadIdentity tells which shard a database is, if it was prepared to be one.
func ReadIdentity(ctx context.Context, conn *pgx.Conn, schema string) (is Identity, err error) {
	err = conn.QueryRow(ctx, qualify("SELECT place, shards FROM {schema}.rate_limit_shard WHERE place IS NOT NULL",
		schema)).Scan(&is.Place, &is.Shards)
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
	_, err := conn.Exec(ctx, qualify("INSERT INTO {schema}.rate_limit_shard (place, shards) VALUES ($1, $2) "+
		"ON CONFLICT (one) DO UPDATE SET place = excluded.place, shards = excluded.shards", schema),
		is.Place, is.Shards)
	return err
}

// readDivision returns the mark of the last division that a database was part of.
func readDivision(ctx context.Context, conn *pgx.Conn, schema string) (division string, err error) {
	err = conn.QueryRow(ctx, qualify("SELECT coalesce(max(division), '') FROM {schema}.rate_limit_shard", schema)).
		Scan(&division)
	return division, err
}
