package policies

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/algorithm"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// The user of a command must give the table and a policy of the kind that the application uses. The rows in the tables
// show both, so that the command can warn of a mistake.

var (
	//go:embed sql/kinds.sql
	kindsSQL string
	//go:embed sql/key_kinds.sql
	keyKindsSQL string
)

// Kinds maps names to the algorithms that wrote the rows in rate_limit_ephemeral and in rate_limit_durable, as a sum of
// 1 << code. Expired rows add 1 to the sum.
type Kinds map[string][2]int64

// of returns the algorithms that wrote a name's rows in the given table and in the other table.
func (k Kinds) of(name string, durable bool) (here, there int64) {
	if durable {
		return k[name][1], k[name][0]
	}
	return k[name][0], k[name][1]
}

func (k Kinds) Either(name string) int64 { return k[name][0] | k[name][1] }

// Elsewhere tells whether a limiter seems to use the other table, because only that table has live rows, or because
// only that table has rows.
func (k Kinds) Elsewhere(name string, durable bool) bool {
	here, there := k.of(name, durable)
	return min(there, 2) > min(here, 2)
}

// add adds the result of kinds.sql or key_kinds.sql.
func (k Kinds) add(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
	var name string
	var durable bool
	var bits int64
	rows, _ := tx.Query(ctx, sql, args...) // rows may contain an error
	_, err := pgx.ForEachRow(rows, []any{&name, &durable, &bits}, func() error {
		kinds := k[name]
		if durable {
			kinds[1] |= bits
		} else {
			kinds[0] |= bits
		}
		k[name] = kinds
		return nil
	})
	return err
}

// RowKinds reads which algorithms wrote the rows of limiters.
func RowKinds(ctx context.Context, tx pgx.Tx, names []string) (Kinds, error) {
	found := Kinds{}
	return found, found.add(ctx, tx, kindsSQL, names, 100, 100)
}

// KindsOf reads which algorithms wrote the rows of a limiter's key. If key is nil or has no live rows, KindsOf reads
// the limiter's other keys, or a sample of them.
func KindsOf(ctx context.Context, a *cli.App, limiter string, key *string) (Kinds, error) {
	names, found := algorithm.RowNames(limiter), Kinds{}
	if key != nil {
		if err := a.InStores(ctx, func(store *cli.App, pool *pgxpool.Pool) error {
			return store.Read(ctx, pool, func(tx pgx.Tx) error {
				return found.add(ctx, tx, keyKindsSQL, names, *key)
			})
		}); err != nil || len(found) > 0 {
			return found, err
		}
	}
	err := a.InStores(ctx, func(store *cli.App, pool *pgxpool.Pool) error {
		return store.Read(ctx, pool, func(tx pgx.Tx) error {
			_, percent, err := cli.TableSizes(ctx, tx, false)
			if err != nil {
				return err
			}
			return found.add(ctx, tx, kindsSQL, names, percent[cli.Table(false)], percent[cli.Table(true)])
		})
	})
	return found, err
}

// PrintWarning prints a warning of Misled, if there is one.
func PrintWarning(w io.Writer, warning string) {
	if warning != "" {
		fmt.Fprintf(w, "warning: %s\n", warning)
	}
}

// Misled returns a warning if the rows of a limiter or key are in the other table, or of another kind than the policy.
// Misled returns "" if this role may not read the tables.
func Misled(ctx context.Context, a *cli.App, limiter string, key *string, policy string, durable bool) string {
	found, err := KindsOf(ctx, a, limiter, key)
	if err != nil {
		return ""
	}
	if found.Elsewhere(limiter, durable) {
		return Elsewhere(limiter, durable)
	}
	numbers, err := algorithm.Parse(policy)
	if err != nil {
		return ""
	}
	for i, p := range numbers {
		name := algorithm.RowName(limiter, i)
		here, _ := found.of(name, durable)
		if own, others := OtherKinds(p.String(), here); others != "" {
			return OfAnotherKind(own, name, others)
		}
	}
	return ""
}

// Elsewhere returns a text that says that a limiter has its rows in the other table.
func Elsewhere(limiter string, durable bool) string {
	do := "give --durable"
	if durable {
		do = "leave out --durable"
	}
	return fmt.Sprintf("limiter %s has its rows in %s, not in %s: %s",
		cli.Printable(limiter), cli.Table(!durable), cli.Table(durable), do)
}

// OfAnotherKind returns a text that says that a policy is of another kind than the rows of a name.
func OfAnotherKind(own, name, others string) string {
	return fmt.Sprintf("this policy is of the kind %s, and the rows of %s are of the kind %s, so it does not "+
		"count them: give the application's policy", own, cli.Printable(name), others)
}

// OtherKinds returns the word for a policy's algorithm, and the words for the algorithms that wrote the rows.
// OtherKinds returns "" and "" if the policy's algorithm wrote some of the rows. OtherKinds looks at the policy's first
// part only, because the policy in the code may have only one part.
func OtherKinds(policy string, bits int64) (own, others string) {
	numbers, err := algorithm.Parse(policy)
	if err != nil || bits>>numbers[0].Algorithm&1 == 1 {
		return "", ""
	}
	return algorithm.ByCode(numbers[0].Algorithm).Word, strings.Join(Words(bits), ", ")
}

// Words returns the words for the algorithms that wrote rows, such as "sliding" in "sliding 10/1m".
func Words(bits int64) []string {
	all := []string{}
	for _, a := range algorithm.All() {
		if bits>>a.Code&1 == 1 {
			all = append(all, a.Word)
		}
	}
	return all
}

// warnOfKind prints a warning if the limiter seems to ignore the policy of a row.
func warnOfKind(ctx context.Context, a *cli.App, r *PolicyRow) {
	if r.Mode != ModeEnforce {
		return
	}
	found, err := KindsOf(ctx, a, r.Limiter, nil)
	if err != nil {
		return // set the policy without a warning
	}
	if own, others := OtherKinds(*r.Policy, found.Either(r.Limiter)); others != "" {
		fmt.Fprintf(a.Stderr, "warning: this policy is of the kind %s, and the rows of %s are of the kind %s: "+
			"if the policy in the code is of that kind too, limiters pass over this one\n",
			own, cli.Printable(r.Limiter), others)
	}
}
