package main

import (
	"context"
	_ "embed"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// A limiter passes over a policy of another kind than the one in the code. This command cannot know that one. But it
// can see which algorithms have written the rows of the limiter's keys.

//go:embed sql/kinds.sql
var kindsSQL string

// rowKinds tells for names of limiters which algorithms have written the rows of their keys: 1 << code, added up. Names
// without rows are missing.
func rowKinds(ctx context.Context, tx pgx.Tx, names []string) (map[string]int64, error) {
	rows, err := tx.Query(ctx, kindsSQL, names)
	if err != nil {
		return nil, err
	}
	kinds := map[string]int64{}
	var name string
	var bits int64
	_, err = pgx.ForEachRow(rows, []any{&name, &bits}, func() error {
		kinds[name] = bits
		return nil
	})
	return kinds, err
}

// otherKinds are the words of a policy's algorithm and of those that have written the limiter's rows, as rowKinds tells
// them. Both are "" if the policy's is one of those. Only its first part counts, because the policy in the code may
// have no others.
func otherKinds(policy string, bits int64) (own, others string) {
	numbers, err := algorithm.Parse(policy)
	if err != nil || bits>>numbers[0].Algorithm&1 == 1 {
		return "", ""
	}
	var words []string
	for _, a := range algorithm.All() {
		if bits>>a.Code&1 == 1 {
			words = append(words, a.Word)
		}
	}
	return algorithm.ByCode(numbers[0].Algorithm).Word, strings.Join(words, ", ")
}

// warnOfKind warns of a policy that the limiter seems to pass over. A role that may not read the tables is not told.
func (a *app) warnOfKind(ctx context.Context, pool *pgxpool.Pool, r *policyRow) {
	if r.Mode != modeEnforce {
		return
	}
	var kinds map[string]int64
	if err := a.read(ctx, pool, func(tx pgx.Tx) (err error) {
		kinds, err = rowKinds(ctx, tx, []string{r.Limiter})
		return err
	}); err != nil {
		return // what was to be done is done
	}
	if own, others := otherKinds(*r.Policy, kinds[r.Limiter]); others != "" {
		fmt.Fprintf(a.stderr, "warning: this policy is of the kind %s, and the rows of %s are of the kind %s: "+
			"if the policy in the code is too, limiters pass this one over\n", own, printable(r.Limiter), others)
	}
}
