package service_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/service"
)

// A program of your own serves what the command pgratelimit serve does.
func ExampleRun() {
	var pool *pgxpool.Pool
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	err := service.Run(ctx, service.Options{
		DB: pool, Dir: "/etc/pgratelimit",
		GRPC: "127.0.0.1:8081", HTTP: "127.0.0.1:8080", Door: "unix:/run/pgratelimit.sock",
		OnFailure: "error", Drain: 20 * time.Second, Logger: slog.Default(),
	})
	fmt.Println(err)
}

// A check before a deploy says what is wrong, and where.
func ExampleCheck() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = os.RemoveAll(dir) }()
	limiters := "limiters:\n  - name: login\n    policy: often\n"
	if err := os.WriteFile(filepath.Join(dir, "limiters.yaml"), []byte(limiters), 0o600); err != nil {
		fmt.Println(err)
		return
	}
	where, _, _ := strings.Cut(service.Check(dir).Error(), ": ")
	fmt.Println(where)
	// Output: limiters.yaml:3
}
