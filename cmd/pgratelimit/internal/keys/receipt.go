package keys

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/receipttext"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

func RefundCommand(a *cli.App) *cobra.Command {
	return a.Finish(&cobra.Command{
		Use:   "refund FILE",
		Short: "Give back what a take took, by its receipt",
		Long: `Gives back what 'pgratelimit take --receipt FILE' took, for example because the work failed. Only units
that still count are given back. FILE may also have a receipt of an application, as Result.Receipt
returns it. The command removes FILE before it asks the database, and writes FILE again only if
certainly nothing was given back. To give more than was taken, use grant.

The database does not know which receipts were used. So do not copy a receipt: a copy gives back what
others have taken for the same key. Use a receipt with the database and schema of the take. A receipt
has the key and is not signed, so keep it from people who may not run reset.`,
		Example: `  pgratelimit refund alice.receipt
  pgratelimit take mail alice --policy "bucket 20 5/10s" --receipt alice.receipt`,
		Args: cobra.ExactArgs(1),
		RunE: a.OnDatabase(func(ctx context.Context, db cli.DB, args []string) error {
			file, err := filepath.EvalSymlinks(args[0]) // removing only a link would leave the receipt
			var content []byte
			if err == nil {
				content, err = os.ReadFile(file)
			}
			if errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("%w; if this receipt was used before, there is nothing left to give back", err)
			}
			if err != nil {
				return err
			}
			return refund(ctx, db, file, strings.TrimSpace(string(content)))
		}),
	})
}

func refund(ctx context.Context, db cli.DB, file, text string) error {
	says, ok := receipttext.Parse(text)
	policy, err := ratelimit.ParsePolicy(says.Policy)
	if !ok || err != nil {
		return cli.Usage(fmt.Errorf("%s is no receipt, or was changed, or a newer release wrote it", file))
	}
	schema, err := db.Home(ctx)
	if err != nil {
		return err
	}
	config := ratelimit.Config{Name: says.Limiter, Durable: says.Durable, Policy: policy}
	limiter, err := newLimiter(db, config, schema)
	if err != nil {
		return err
	}
	taken, err := limiter.ParseReceipt(text)
	if err != nil {
		return cli.Usage(err)
	}
	if err := os.Remove(file); err != nil {
		return err
	}
	balance, err := limiter.Refund(ctx, taken)
	if err != nil {
		if lost := restore(file, taken); lost != nil {
			return fmt.Errorf("%s; the receipt is used up: %w", db.Message(err), lost)
		}
		return err
	}
	tell(ctx, db, says.Limiter, says.Key)
	return given("refunded", balance).print(db.App)
}

// restore writes a receipt again, unless the take may have been refunded.
func restore(path string, taken ratelimit.Result) error {
	text, err := taken.Receipt()
	if err != nil {
		return errors.New("perhaps it was given back")
	}
	file, err := createReceipt(path)
	if err != nil {
		return err
	}
	return writeReceipt(file, text)
}

// createReceipt creates a new file that only its owner can read, because a key may be personal data.
func createReceipt(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) //nolint:gosec // the user names it
}

func writeReceipt(file *os.File, text string) error {
	_, err := fmt.Fprintln(file, text)
	return errors.Join(err, file.Close())
}

// take requests cost units. If the request is allowed and path is not "", take writes a receipt.
func (q question) take(ctx context.Context, cost int64, path string) (ratelimit.Result, error) {
	if path == "" || q.dry {
		return q.limiter.AllowN(ctx, q.key, cost)
	}
	file, err := createReceipt(path) // create the file first, because without a receipt the take could not be refunded
	if err != nil {
		return ratelimit.Result{}, fmt.Errorf("%w; nothing was taken", err)
	}
	result, err := q.limiter.AllowN(ctx, q.key, cost)
	if err != nil || !result.Allowed {
		return result, errors.Join(err, file.Close(), os.Remove(path))
	}
	text, err := result.Receipt()
	return result, errors.Join(err, writeReceipt(file, text))
}
