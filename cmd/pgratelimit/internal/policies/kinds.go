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

// A user who asks about a limiter must name its table and a policy of its kind. Only the application knows these. But
// the rows in the tables show what the limiter uses.

var (
	//go:embed sql/kinds.sql
	kindsSQL string
	//go:embed sql/key_kinds.sql
	keyKindsSQL string
)

// Kinds has the algorithms that wrote the rows of each name, in rate_limit_ephemeral and in rate_limit_durable, as a
// sum of 1 << code. All expired rows together count as 1.
type Kinds map[string][2]int64

// of returns the kinds of a name's rows, in the given table and in the other one.
func (k Kinds) of(name string, durable bool) (here, there int64) {
	if durable {
		return k[name][1], k[name][0]
	}
	return k[name][0], k[name][1]
}

func (k Kinds) Either(name string) int64 { return k[name][0] | k[name][1] }

// Elsewhere tells whether a limiter seems to use the other table: only that one has live rows, or only that one has any
// rows.
func (k Kinds) Elsewhere(name string, durable bool) bool {
	here, there := k.of(name, durable)
	return min(there, 2) > min(here, 2)
}

// add adds the rows of kinds.sql or key_kinds.sql.
func (k Kinds) add(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
	var name string
	var durable bool
	var bits int64
	rows, _ := tx.Query(ctx, sql, args...) // rows has the error too
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

// KindsOf reads which algorithms wrote the rows of a limiter's key. If key is nil, or has no live rows, it reads all
// keys, or a sample of them.
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

// PrintWarning prints what Misled returns.
func PrintWarning(w io.Writer, warning string) {
	if warning != "" {
		fmt.Fprintf(w, "warning: %s\n", warning)
	}
}

// Misled returns a warning if the rows of a limiter, or of one of its keys, are in the other table, or of another kind
// than the policy. For a role that may not read the tables it returns nothing.
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

// Elsewhere says that a limiter has its rows in the other table.
func Elsewhere(limiter string, durable bool) string {
	do := "give --durable"
	if durable {
		do = "leave out --durable"
	}
	return fmt.Sprintf("limiter %s has its rows in %s, not in %s: %s",
		cli.Printable(limiter), cli.Table(!durable), cli.Table(durable), do)
}

// OfAnotherKind says that a policy is of another kind than the rows of a name.
func OfAnotherKind(own, name, others string) string {
	return fmt.Sprintf("this policy is of the kind %s, and the rows of %s are of the kind %s, so it does not "+
		"count them: give the application's policy", own, cli.Printable(name), others)
}

// OtherKinds returns the word for a policy's algorithm, and the words for the algorithms that wrote the rows. Both are
// "" if the policy's algorithm wrote some of them. Only the policy's first part counts, because the policy in the code
// may have only one.
func OtherKinds(policy string, bits int64) (own, others string) {
	numbers, err := algorithm.Parse(policy)
	if err != nil || bits>>numbers[0].Algorithm&1 == 1 {
		return "", ""
	}
	return algorithm.ByCode(numbers[0].Algorithm).Word, strings.Join(Words(bits), ", ")
}

// Words returns the words for the algorithms that wrote rows. These words are the first words of a policy's text.
func Words(bits int64) []string {
	all := []string{}
	for _, a := range algorithm.All() {
		if bits>>a.Code&1 == 1 {
			all = append(all, a.Word)
		}
	}
	return all
}

// warnOfKind warns if the limiter seems to ignore a policy.
func warnOfKind(ctx context.Context, a *cli.App, r *PolicyRow) {
	if r.Mode != ModeEnforce {
		return
	}
	found, err := KindsOf(ctx, a, r.Limiter, nil)
	if err != nil {
		return // the policy is set anyway
	}
	if own, others := OtherKinds(*r.Policy, found.Either(r.Limiter)); others != "" {
		fmt.Fprintf(a.Stderr, "warning: this policy is of the kind %s, and the rows of %s are of the kind %s: "+
			"if the policy in the code is of that kind too, limiters pass over this one\n",
			own, cli.Printable(r.Limiter), others)
	}
}
