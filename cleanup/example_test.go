package cleanup_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/cleanup"
)

// Every process of an application runs this. Every five minutes one of the processes sweeps.
func ExampleSweeper_Run() {
	var (
		ctx  context.Context
		pool *pgxpool.Pool
	)
	sweeper, err := cleanup.New(pool, cleanup.Config{Logger: slog.Default()})
	if err != nil {
		log.Fatal(err)
	}
	go func() {
		if err := sweeper.Run(ctx); err != nil {
			log.Print(err)
		}
	}()
}

// A program that cron starts does one pass.
func ExampleSweeper_RunOnce() {
	var pool *pgxpool.Pool
	sweeper, err := cleanup.New(pool, cleanup.Config{})
	if err != nil {
		log.Fatal(err)
	}
	result, err := sweeper.RunOnce(context.Background())
	fmt.Println(result.Deleted, result.Complete, err)
}
