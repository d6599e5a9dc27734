package policies

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/big"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// PolicyChange is the output of a command that changes policies.
type PolicyChange struct {
	DryRun  bool        `json:"dry_run"`
	Removed []PolicyRow `json:"removed"`
	Added   *PolicyRow  `json:"added"` // null if no row was added
	// Overrides is the row that the added row overrides. Both rows have the same target, and remain in the table.
	Overrides *PolicyRow `json:"overrides"`
	Lowers    bool       `json:"lowers"` // whether the change may lower the limit, so that it needs --force
	at        time.Time
	because   string // the reason why the change may lower the limit

	// These are words in the output.
	removed, added string
	none           string // the output if nothing changes
}

// carryOut changes policies and prints the changes. The function decide gets the rows for the target, and sets the
// changes. Meanwhile, no other session can change policies.
func (c *PolicyChange) carryOut(
	ctx context.Context, a *cli.App, name string, target PolicyTarget, decide func(rows []PolicyRow) error,
) error {
	transaction := cli.DB.Write
	if c.DryRun {
		transaction = cli.DB.Read
	}
	c.Removed = []PolicyRow{} // [] instead of null in JSON
	if err := a.InFirst(ctx, func(db cli.DB) error {
		return transaction(db, ctx, func(tx cli.Tx) error {
			if !c.DryRun {
				if _, err := tx.Exec(ctx, turnSQL); err != nil {
					return err
				}
			}
			rows, at, err := ApplyingPolicies(ctx, tx, name, target, true)
			if err != nil {
				return err
			}
			c.at = at
			if err := decide(rows); err != nil || c.DryRun {
				return err
			}
			return c.write(ctx, tx)
		})
	}); err != nil {
		return err
	}
	return a.Print(c, c.print)
}

func (c *PolicyChange) write(ctx context.Context, tx cli.Tx) error {
	if len(c.Removed) > 0 {
		var ids []int64
		for _, r := range c.Removed {
			ids = append(ids, r.ID)
		}
		if _, err := tx.Exec(ctx, removeSQL, ids); err != nil {
			return err
		}
	}
	r := c.Added
	if r == nil {
		return nil
	}
	rows, err := cli.Rows[PolicyRow](ctx, tx, addSQL, r.Limiter, r.Key, r.KeyPrefix, r.Mode, r.Policy, r.ValidFrom,
		r.ValidUntil, r.Comment)
	if err == nil {
		*r = rows[0]
	}
	return err
}

func (c *PolicyChange) print(w io.Writer) {
	if len(c.Removed) == 0 && c.Added == nil {
		fmt.Fprintln(w, c.none)
		return
	}
	would := ""
	if c.DryRun {
		would = "would be "
	}
	fmt.Fprintf(w, "WHAT\t%s\n", header)
	for i := range c.Removed {
		fmt.Fprintf(w, "%s%s\t%s\n", would, c.removed, c.Removed[i].line())
	}
	if c.Added != nil {
		fmt.Fprintf(w, "%s%s\t%s\n", would, c.added, c.Added.line())
	}
	if c.Overrides != nil {
		fmt.Fprintf(w, "%soverridden\t%s\n", would, c.Overrides.line())
	}
	if c.DryRun && c.Lowers {
		fmt.Fprintf(w, "\nthis %s, and needs --force\n", c.because)
	}
}

// moment is a time, or a duration after another time.
type moment struct {
	after time.Duration
	at    time.Time
}

func readMoment(text string) (*moment, error) {
	if span, err := readSpan(text); err == nil {
		return &moment{after: span}, nil
	}
	for _, layout := range []string{
		time.RFC3339, "2006-01-02 15:04:05Z07:00", "2006-01-02 15:04:05", "2006-01-02 15:04", "2006-01-02",
	} {
		if at, err := time.Parse(layout, text); err == nil {
			return &moment{at: at}, nil
		}
	}
	return nil, errors.New("it has to be a duration, like 90m or 7d, or a time, like 2026-12-31 (in UTC) " +
		"or 2026-12-31T18:00:00+01:00")
}

func (m *moment) since(t time.Time) time.Time {
	if m.after > 0 {
		return t.Add(m.after).Truncate(time.Microsecond)
	}
	return m.at.UTC()
}

// readSpan parses a duration such as 7d or 90m. Go's durations have no days.
func readSpan(text string) (time.Duration, error) {
	numbers, err := algorithm.Parse("fixed 1/" + text)
	if err != nil || len(numbers) != 1 || numbers[0].Span < time.Microsecond {
		return 0, errors.New("it has to be a duration, like 90m or 7d")
	}
	return numbers[0].Span, nil
}

func addComment(cmd *cobra.Command, comment *string) {
	cmd.Flags().StringVar(comment, "comment", "", "why, for whoever reads this next")
	cobra.CheckErr(cmd.MarkFlagRequired("comment"))
}

func checkComment(comment string) error {
	if strings.Trim(comment, " ") == "" {
		return cli.Usage(errors.New("--comment is empty: say why, for whoever reads this next"))
	}
	return nil
}

func setCommand(a *cli.App) *cobra.Command {
	var target targetFlags
	var from, until *moment // nil if the flag is not given
	var comment, mode string
	var off, force, dry bool
	cmd := &cobra.Command{
		Use:   "set NAME TARGET {POLICY | --off} --comment WHY",
		Short: "Set the policy for a key, for a prefix, or for everybody",
		Long: `Sets the policy for TARGET: --key KEY, --prefix PREFIX or --everybody. Processes learn of the policy
within a second of the commit. A limiter passes over a policy of another kind than the policy in the
code, and logs a warning. The command also warns if all rows of the limiter are of another kind.

Without --until and --from, the policy replaces the rows for the same TARGET that have begun, even a
ban. The command shows the rows that it replaces. Rows that have not begun stay. With --until or --from,
the policy replaces no row. It overrides the row that is in force when the policy begins. When the
policy ends, this row is in force again. Rows of --mode shadow only replace and override rows of the
same mode.

The command lowers a limit only with --force. It compares the policy with the rows that it replaces, and
with the row that would otherwise be in force when the policy begins, even a row for a shorter prefix or
for everybody. A policy is lower if it allows less at once, or less in the long run. The policy in the
code is not compared, because the command does not know it. --off and --mode shadow lower no limit. A
row that this release cannot read is not compared, and is replaced only with --force.`,
		Example: `  pgratelimit policy set api --key customer:42 "sliding 5000/1m" \
      --comment "ticket 1234"
  pgratelimit policy set api --prefix free: "sliding 50/1m" --until 2h \
      --force --comment "attack"
  pgratelimit policy set login --everybody "sliding 5/1m" --mode shadow \
      --comment "would 5 do?"
  pgratelimit policy set api --key load-test --off --from 2027-01-10 \
      --until 1d --comment "load test"`,
		Args: func(cmd *cobra.Command, args []string) error {
			if off {
				return cobra.ExactArgs(1)(cmd, args)
			}
			return cobra.ExactArgs(2)(cmd, args)
		},
	}
	cmd.RunE = cli.Action(func(ctx context.Context, args []string) error {
		wanted := &PolicyRow{Mode: mode, Comment: comment}
		switch {
		case mode != ModeEnforce && mode != ModeShadow:
			return cli.Usage(fmt.Errorf("--mode is %q, and must be enforce or shadow; --off and 'pgratelimit ban' "+
				"are the other two", mode))
		case off && mode == ModeShadow:
			return cli.Usage(errors.New("--off is no shadow, because it decides nothing"))
		case off:
			wanted.Mode = ModeOff
		default:
			policy, err := ratelimit.ParsePolicy(args[1])
			if err != nil {
				return cli.Usage(err)
			}
			if mode == ModeShadow && HasSlots(args[1]) {
				return cli.Usage(fmt.Errorf("the policy %q cannot have --mode shadow, because nobody would release "+
					"the slots that it gives; set it for a single key or a prefix instead", args[1]))
			}
			wanted.Policy = new(policy.String())
		}
		to := target.PolicyTarget
		wanted.Limiter, wanted.Key, wanted.KeyPrefix = args[0], to.Key, to.prefix
		if err := errors.Join(CheckPolicyTarget(args[0], to), checkComment(comment)); err != nil {
			return cli.Usage(err)
		}
		c := PolicyChange{DryRun: dry, removed: "replaced", added: "set"}
		if err := c.carryOut(ctx, a, args[0], to, func(rows []PolicyRow) error {
			if err := wanted.begin(from, until, c.at); err != nil {
				return err
			}
			c.Added = wanted
			replaces := from == nil && until == nil
			for _, r := range rows {
				if replaces && r.Target().is(to) && r.shadow() == wanted.shadow() && r.Counts(c.at) {
					c.Removed = append(c.Removed, r)
				}
			}
			if r := First(rows, *wanted.ValidFrom, wanted.shadow()); !replaces && r != nil && r.Target().is(to) {
				c.Overrides = r
			}
			c.compare(rows)
			if c.Lowers && !force && !dry {
				return fmt.Errorf("nothing was done, because this %s; --force does it", c.because)
			}
			return nil
		}); err != nil {
			return err
		}
		warnOfKind(ctx, a, wanted)
		return nil
	})
	target.add(cmd)
	cmd.MarkFlagsOneRequired("key", "prefix", "everybody")
	addComment(cmd, &comment)
	cmd.Flags().StringVar(&mode, "mode", ModeEnforce, "enforce, or shadow: decide it too, and only report it")
	cmd.Flags().BoolVar(&off, "off", false, "allow everything, and count nothing, instead of a POLICY")
	cmd.Flags().Var(cli.Parsed(&from, "time", readMoment), "from",
		"when it begins (default: now); a duration counts from now")
	cmd.Flags().Var(cli.Parsed(&until, "time", readMoment), "until",
		"when it ends (default: never); a duration counts from when it begins")
	cmd.Flags().BoolVar(&force, "force", false, "lower a limit, too")
	addDryRun(cmd, &dry)
	return a.Finish(cmd)
}

func addDryRun(cmd *cobra.Command, dry *bool) {
	cmd.Flags().BoolVar(dry, "dry-run", false, "only show what would change")
}

// begin sets the beginning and the end of a row. The argument now is the database's time.
func (r *PolicyRow) begin(from, until *moment, now time.Time) error {
	begins := now
	if from != nil {
		if begins = from.since(now); !begins.After(now) {
			return cli.Usage(fmt.Errorf("--from, %s, is not later than now, %s; leave it out to begin now",
				cli.Instant(begins), cli.Instant(now)))
		}
	}
	r.ValidFrom = &begins
	if until != nil {
		ends := until.since(begins)
		if !ends.After(begins) {
			return cli.Usage(fmt.Errorf("--until, %s, is not later than the beginning, %s",
				cli.Instant(ends), cli.Instant(begins)))
		}
		r.ValidUntil = &ends
	}
	return nil
}

// compare checks whether the added row lowers the limit. The argument rows has the rows for the same target.
func (c *PolicyChange) compare(rows []PolicyRow) {
	if c.Added.shadow() || c.Added.Mode == ModeOff {
		return
	}
	others := c.Removed
	if r := First(rows, *c.Added.ValidFrom, false); r != nil {
		others = append([]PolicyRow{*r}, others...)
	}
	for i := range others {
		switch r := &others[i]; {
		case !r.readable(): // limiters of a newer release may obey this row
			c.because = fmt.Sprintf("replaces %s, which this release cannot read", r.Decides())
		case isLower(c.Added, r):
			c.because = fmt.Sprintf("lowers the limit, from %s to %s", r.Decides(), c.Added.Decides())
		default:
			continue
		}
		c.Lowers = true
		return
	}
}

// isLower tells whether row r allows less than the other row, either at once or in the long run.
func isLower(r, than *PolicyRow) bool {
	switch {
	case than.Mode == ModeDeny:
		return false
	case than.Policy == nil: // the other row allows everything
		return true
	}
	a, err := allowance(*r.Policy)
	b, otherErr := allowance(*than.Policy)
	if err != nil || otherErr != nil {
		return true
	}
	for i := range a {
		if a[i] != nil && (b[i] == nil || a[i].Cmp(b[i]) < 0) {
			return true
		}
	}
	return false
}

// allowance returns how many units a policy allows at once, how many per nanosecond in the long run, and how many
// units its slots have. What the policy does not limit is nil.
func allowance(text string) (all [3]*big.Rat, err error) {
	policies, err := algorithm.Parse(text)
	if err != nil {
		return all, err
	}
	atMost := func(i int, n *big.Rat) {
		if all[i] == nil || n.Cmp(all[i]) < 0 {
			all[i] = n
		}
	}
	for _, p := range policies {
		switch {
		case p.HasSlots():
			atMost(2, big.NewRat(p.Limit, 1))
			continue
		case p.Span <= 0:
			return all, errors.New("it has no span")
		}
		flow := p.Limit
		if p.Refills() {
			flow = p.Refill
		}
		atMost(0, big.NewRat(p.Limit, 1))
		atMost(1, big.NewRat(flow, int64(p.Span)))
	}
	return all, nil
}

func unsetCommand(a *cli.App) *cobra.Command {
	var target targetFlags
	var mode string
	var dry bool
	cmd := &cobra.Command{
		Use:   "unset NAME TARGET",
		Short: "Remove the policies for a key, for a prefix, or for everybody",
		Long: `Removes the rows for TARGET, and shows them: --key KEY, --prefix PREFIX or --everybody. Rows that have
not begun are removed too. Then the policy for a shorter prefix, for everybody, or in the code is in
force. A ban by a person is removed too. A ban by a limiter stays: 'pgratelimit unban' removes it. With
--mode shadow, only rows of this mode are removed. Without --mode, only rows of other modes are removed.`,
		Example: `  pgratelimit policy unset api --key customer:42
  pgratelimit policy unset login --everybody --mode shadow
  pgratelimit policy unset api --prefix free: --dry-run --json`,
		Args: cobra.ExactArgs(1),
	}
	cmd.RunE = cli.Action(func(ctx context.Context, args []string) error {
		to := target.PolicyTarget
		if mode != ModeEnforce && mode != ModeShadow {
			return cli.Usage(fmt.Errorf("--mode is %q, and must be enforce or shadow", mode))
		}
		if err := CheckPolicyTarget(args[0], to); err != nil {
			return err
		}
		c := PolicyChange{DryRun: dry, removed: "removed", none: "there is nothing to remove"}
		return c.carryOut(ctx, a, args[0], to, func(rows []PolicyRow) error {
			for _, r := range rows {
				if r.Target().is(to) && r.shadow() == (mode == ModeShadow) && !r.Automatic {
					c.Removed = append(c.Removed, r)
				}
			}
			return nil
		})
	})
	target.add(cmd)
	cmd.MarkFlagsOneRequired("key", "prefix", "everybody")
	cmd.Flags().StringVar(&mode, "mode", ModeEnforce, "enforce, for all rows that decide, or shadow")
	addDryRun(cmd, &dry)
	return a.Finish(cmd)
}

func BanCommand(a *cli.App) *cobra.Command {
	var lasts time.Duration
	var comment string
	cmd := &cobra.Command{
		Use:   "ban NAME KEY --for DURATION --comment WHY",
		Short: "Deny everything to a key for a while",
		Long: `Denies all requests of a key for a while, in limiters whose Config.Policies is set. The ban replaces a
ban by a person that would end sooner. If the key is already banned for longer, nothing changes. A ban
by a limiter stays, so that the limiter's next ban is longer. To ban a prefix or everybody, INSERT a row
of the mode deny into rate_limit_policy.`,
		Example: `  pgratelimit ban login user:123 --for 1h --comment "tries passwords"
  pgratelimit ban api 203.0.113.7 --for 7d --comment "ticket 1234" --json`,
		Args: cobra.ExactArgs(2),
		RunE: cli.Action(func(ctx context.Context, args []string) error {
			to := PolicyTarget{Key: &args[1]}
			if err := errors.Join(CheckPolicyTarget(args[0], to), checkComment(comment)); err != nil {
				return cli.Usage(err)
			}
			c := PolicyChange{removed: "replaced", added: "banned"}
			return c.carryOut(ctx, a, args[0], to, func(rows []PolicyRow) error {
				ends := c.at.Add(lasts)
				decided := false // a row that began later decides
				for _, r := range rows {
					if !r.Target().is(to) || r.shadow() || !r.Counts(c.at) || !r.readable() {
						continue
					}
					decides := !decided
					decided = true
					switch {
					case r.Mode != ModeDeny:
					case decides && r.ValidUntil == nil:
						c.none = "the key is already banned, without an end"
						return nil
					case decides && r.ValidUntil.After(ends):
						c.none = "the key is already banned, until " + cli.Instant(*r.ValidUntil)
						return nil
					case !r.Automatic:
						c.Removed = append(c.Removed, r)
					}
				}
				c.Added = &PolicyRow{Limiter: args[0], Key: to.Key, Mode: ModeDeny, Comment: comment,
					ValidFrom: &c.at, ValidUntil: &ends}
				return nil
			})
		}),
	}
	cmd.Flags().Var(cli.Parsed(&lasts, "duration", readSpan), "for", "how long, like 90m or 7d")
	cobra.CheckErr(cmd.MarkFlagRequired("for"))
	addComment(cmd, &comment)
	return a.Finish(cmd)
}

func UnbanCommand(a *cli.App) *cobra.Command {
	return a.Finish(&cobra.Command{
		Use:   "unban NAME KEY",
		Short: "Remove the bans of a key",
		Long: `Removes all bans of a key, whether people or limiters made them. If a limiter bans the key again, the
ban is as short as a first ban. Bans of a prefix of the key, or of everybody, stay: 'pgratelimit
explain' shows them, and 'pgratelimit policy unset' removes them.`,
		Example: `  pgratelimit unban login user:123
  pgratelimit unban api 203.0.113.7 --json`,
		Args: cobra.ExactArgs(2),
		RunE: cli.Action(func(ctx context.Context, args []string) error {
			to := PolicyTarget{Key: &args[1]}
			if err := CheckPolicyTarget(args[0], to); err != nil {
				return err
			}
			c := PolicyChange{removed: "removed", none: "the key is not banned"}
			return c.carryOut(ctx, a, args[0], to, func(rows []PolicyRow) error {
				for _, r := range rows {
					if r.Target().is(to) && r.Mode == ModeDeny {
						c.Removed = append(c.Removed, r)
					}
				}
				return nil
			})
		}),
	})
}
