package policies

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

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

// Kinds has, for each name in each table, the algorithms that wrote the rows, as a sum of 1 << code. Expired rows add 1
// to the sum.
type Kinds map[rowsOf]int64

type rowsOf struct {
	name    string
	durable bool
}

func (k Kinds) Either(name string) int64 { return k[rowsOf{name, false}] | k[rowsOf{name, true}] }

// Elsewhere tells whether a limiter seems to use the other table. The limiter seems to do so if only that table has
// live rows, or if only that table has any rows.
func (k Kinds) Elsewhere(name string, durable bool) bool {
	return min(k[rowsOf{name, !durable}], 2) > min(k[rowsOf{name, durable}], 2)
}

// add adds the result of kinds.sql or key_kinds.sql.
func (k Kinds) add(ctx context.Context, tx cli.Tx, sql string, args ...any) error {
	var of rowsOf
	var bits int64
	rows, _ := tx.Query(ctx, sql, args...) // rows may contain an error
	_, err := pgx.ForEachRow(rows, []any{&of.name, &of.durable, &bits}, func() error {
		k[of] |= bits
		return nil
	})
	return err
}

// RowKinds reads which algorithms wrote the rows of limiters.
func RowKinds(ctx context.Context, tx cli.Tx, names []string) (Kinds, error) {
	found := Kinds{}
	return found, found.add(ctx, tx, kindsSQL, names, 100, 100)
}

// KindsOf reads which algorithms wrote the rows of a limiter's key. If key is nil or has no live rows, KindsOf reads
// the limiter's other keys, or a sample of them.
func KindsOf(ctx context.Context, a *cli.App, limiter string, key *string) (Kinds, error) {
	names, found := algorithm.RowNames(limiter), Kinds{}
	inStores := func(query func(tx cli.Tx) error) error {
		return a.InStores(ctx, func(store cli.DB) error { return store.Read(ctx, query) })
	}
	if key != nil {
		err := inStores(func(tx cli.Tx) error { return found.add(ctx, tx, keyKindsSQL, names, *key) })
		if err != nil || len(found) > 0 {
			return found, err
		}
	}
	err := inStores(func(tx cli.Tx) error {
		_, percent, err := cli.TableSizes(ctx, tx, false)
		if err != nil {
			return err
		}
		return found.add(ctx, tx, kindsSQL, names, percent[cli.Table(false)], percent[cli.Table(true)])
	})
	return found, err
}

// PrintWarning prints a warning that Misled returned, unless it is "".
func PrintWarning(w io.Writer, warning string) {
	if warning != "" {
		fmt.Fprintf(w, "warning: %s\n", warning)
	}
}

// Misled returns a warning if a limiter's or key's rows are in the other table, or are of another kind than the policy.
// Misled returns "" if this role may not read the tables.
func Misled(ctx context.Context, a *cli.App, limiter string, key *string, policy string, durable bool) string {
	found, err := KindsOf(ctx, a, limiter, key)
	if err != nil {
		return ""
	}
	if found.Elsewhere(limiter, durable) {
		return Elsewhere(limiter, durable)
	}
	numbers, _ := algorithm.Parse(policy) // the text was parsed before
	for i, p := range numbers {
		name := algorithm.RowName(limiter, i)
		if own, others := OtherKinds(p.String(), found[rowsOf{name, durable}]); others != "" {
			return OfAnotherKind(own, name, others)
		}
	}
	return ""
}

// Elsewhere returns a text which says that a limiter's rows are in the other table.
func Elsewhere(limiter string, durable bool) string {
	do := "give --durable"
	if durable {
		do = "leave out --durable"
	}
	return fmt.Sprintf("limiter %s has its rows in %s, not in %s: %s",
		cli.Printable(limiter), cli.Table(!durable), cli.Table(durable), do)
}

// OfAnotherKind returns a text which says that a policy is of another kind than a limiter's rows.
func OfAnotherKind(own, name, others string) string {
	return fmt.Sprintf("this policy is of the kind %s, and the rows of %s are of the kind %s, so it does not "+
		"count them: give the application's policy", own, cli.Printable(name), others)
}

// OtherKinds returns the word for a policy's algorithm, and the words for the algorithms that wrote the rows. Both
// results are "" if the policy's algorithm wrote some of the rows. OtherKinds looks at the policy's first part only,
// because the policy in the code may have only one part.
func OtherKinds(policy string, bits int64) (own, others string) {
	numbers, err := algorithm.Parse(policy)
	if err != nil || bits>>numbers[0].Algorithm&1 == 1 {
		return "", ""
	}
	return algorithm.ByCode(numbers[0].Algorithm).Word, strings.Join(Words(bits), ", ")
}

// Words returns the words for the algorithms of rows and their holds, such as "sliding" in "sliding 10/1m".
func Words(bits int64) []string {
	all := []string{}
	for code := algorithm.FixedWindow; code <= algorithm.Concurrency; code++ {
		if bits>>code&1 == 1 {
			all = append(all, algorithm.ByCode(code).Word)
		}
	}
	return all
}

// warnOfKind prints a warning if the limiter seems to ignore the policy of a row.
func warnOfKind(ctx context.Context, a *cli.App, r *PolicyRow) {
	if r.Mode == ModeOff {
		return
	}
	found, err := KindsOf(ctx, a, r.Limiter, nil)
	if err != nil {
		return // set the policy without a warning
	}
	if r.shadow() {
		if slices.ContainsFunc(algorithm.RowNames(r.Limiter), func(name string) bool {
			return found.Either(name)>>algorithm.Concurrency&1 == 1
		}) {
			fmt.Fprintf(a.Stderr, "warning: limiter %s seems to have a policy with slots: such a limiter decides no "+
				"shadows\n", cli.Printable(r.Limiter))
		}
		return
	}
	if own, others := OtherKinds(*r.Policy, found.Either(r.Limiter)); others != "" {
		fmt.Fprintf(a.Stderr, "warning: this policy is of the kind %s, and the rows of %s are of the kind %s: "+
			"if the policy in the code is of that kind too, limiters pass over this one\n",
			own, cli.Printable(r.Limiter), others)
	}
}
