package migrations_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/migrations"
)

// An application migrates when it starts. Any number of its processes may do so at once.
func ExampleUp() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	if err := migrations.Up(ctx, pool); err != nil {
		log.Fatal(err)
	}
}

// A deploy shows what it would apply.
func ExampleStatus() {
	var pool *pgxpool.Pool
	all, err := migrations.Status(context.Background(), pool)
	if err != nil {
		log.Fatal(err)
	}
	for _, migration := range all {
		if !migration.Applied {
			fmt.Println(migration.Version, migration.Name)
		}
	}
}

// Whoever has only tried the library out removes it, with all counts and policies.
func ExampleDownTo() {
	var pool *pgxpool.Pool
	if err := migrations.DownTo(context.Background(), pool, 0); err != nil {
		log.Fatal(err)
	}
}
