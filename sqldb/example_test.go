package sqldb_test

import (
	"context"
	"database/sql"
	"errors"
	"log"
	"os"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/sqldb"
)

func Example() {
	ctx := context.Background()
	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	if err := migrations.Up(ctx, sqldb.Pool(db)); err != nil {
		log.Fatal(err)
	}
	limiter, err := ratelimit.New(sqldb.Pool(db), ratelimit.Config{
		Name:   "orders",
		Policy: ratelimit.SlidingWindow{Limit: 10, Window: 24 * time.Hour},
	})
	if err != nil {
		log.Fatal(err)
	}

	order := func() error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }() // has no effect after Commit
		if _, err := tx.ExecContext(ctx, `INSERT INTO orders (customer) VALUES ('acme')`); err != nil {
			return err
		}
		result, err := limiter.WithTx(sqldb.Tx(tx)).Allow(ctx, "customer:acme")
		if err != nil {
			return err
		}
		if !result.Allowed {
			return errors.New("no orders left today")
		}
		return tx.Commit()
	}
	if err := order(); err != nil {
		log.Print(err)
	}
}
