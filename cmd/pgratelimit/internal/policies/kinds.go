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

// Whoever asks about a limiter has to know its table and the kind of its policy. This command cannot know what the code
// says of them. But it can see what is in the tables.

var (
	//go:embed sql/kinds.sql
	kindsSQL string
	//go:embed sql/key_kinds.sql
	keyKindsSQL string
)

// Kinds are the algorithms that have written rows, by the names of the rows: 1 << code, added up, in
// rate_limit_ephemeral and in rate_limit_durable. All that have expired count as 1.
type Kinds map[string]*[2]int64

// of are the kinds of the rows of a name, in one table and in the other one.
func (k Kinds) of(name string, durable bool) (here, there int64) {
	rows := k[name]
	switch {
	case rows == nil:
		return 0, 0
	case durable:
		return rows[1], rows[0]
	}
	return rows[0], rows[1]
}

func (k Kinds) Either(name string) int64 {
	here, there := k.of(name, false)
	return here | there
}

// Elsewhere tells whether a limiter seems to keep its rows in the other table: that one has live rows, and this one
// none, or that one has some, and this one none at all.
func (k Kinds) Elsewhere(name string, durable bool) bool {
	here, there := k.of(name, durable)
	return min(there, 2) > min(here, 2)
}

// scan adds rows of kinds.sql or key_kinds.sql.
func (k Kinds) scan(rows pgx.Rows, err error) error {
	if err != nil {
		return err
	}
	var name string
	var durable bool
	var bits int64
	_, err = pgx.ForEachRow(rows, []any{&name, &durable, &bits}, func() error {
		if k[name] == nil {
			k[name] = &[2]int64{}
		}
		if durable {
			k[name][1] |= bits
		} else {
			k[name][0] |= bits
		}
		return nil
	})
	return err
}

// RowKinds tells which algorithms have written the rows of limiters.
func RowKinds(ctx context.Context, tx pgx.Tx, names []string) (Kinds, error) {
	found := Kinds{}
	return found, found.scan(tx.Query(ctx, kindsSQL, names, 100, 100))
}

// KindsOf tells which algorithms have written the rows of a limiter's key. If key is nil, or has no live rows, it looks
// at all keys, or at a sample of them.
func KindsOf(ctx context.Context, a *cli.App, limiter string, key *string) (Kinds, error) {
	names, found := algorithm.RowNames(limiter), Kinds{}
	if key != nil {
		if err := a.InStores(ctx, func(store *cli.App, pool *pgxpool.Pool) error {
			return store.Read(ctx, pool, func(tx pgx.Tx) error {
				return found.scan(tx.Query(ctx, keyKindsSQL, names, *key))
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
			return found.scan(tx.Query(ctx, kindsSQL, names, percent[cli.Table(false)], percent[cli.Table(true)]))
		})
	})
	return found, err
}

// PrintWarning prints what misled says.
func PrintWarning(w io.Writer, warning string) {
	if warning != "" {
		fmt.Fprintf(w, "warning: %s\n", warning)
	}
}

// Misled says what is wrong with a question about a limiter, or about one of its keys: that its rows are in the other
// table, or of another kind than the policy. A role that may not read the tables is not told.
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

// Elsewhere says in which table a limiter has its rows, which is not the one that was asked for.
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
	return fmt.Sprintf("this policy is of the kind %s, and the rows of %s are of the kind %s, which count as none "+
		"under it: give the policy of the application", own, cli.Printable(name), others)
}

// OtherKinds are the words of a policy's algorithm and of those that have written rows. Both are "" if the policy's is
// one of those. Only its first part counts, because the policy in the code may have no others.
func OtherKinds(policy string, bits int64) (own, others string) {
	numbers, err := algorithm.Parse(policy)
	if err != nil || bits>>numbers[0].Algorithm&1 == 1 {
		return "", ""
	}
	return algorithm.ByCode(numbers[0].Algorithm).Word, strings.Join(Words(bits), ", ")
}

// Words are the algorithms that have written rows, as a policy's text begins.
func Words(bits int64) []string {
	all := []string{}
	for _, a := range algorithm.All() {
		if bits>>a.Code&1 == 1 {
			all = append(all, a.Word)
		}
	}
	return all
}

// warnOfKind warns of a policy that the limiter seems to pass over.
func warnOfKind(ctx context.Context, a *cli.App, r *PolicyRow) {
	if r.Mode != ModeEnforce {
		return
	}
	found, err := KindsOf(ctx, a, r.Limiter, nil)
	if err != nil {
		return // what was to be done is done
	}
	if own, others := OtherKinds(*r.Policy, found.Either(r.Limiter)); others != "" {
		fmt.Fprintf(a.Stderr, "warning: this policy is of the kind %s, and the rows of %s are of the kind %s: "+
			"if the policy in the code is too, limiters pass this one over\n", own, cli.Printable(r.Limiter), others)
	}
}
