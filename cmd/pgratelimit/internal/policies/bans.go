package policies

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

func BanCommand(a *cli.App) *cobra.Command {
	var lasts spanValue
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
				ends := c.at.Add(time.Duration(lasts))
				decided := false // a row that began later decides
				for _, r := range rows {
					if !r.Target().is(to) || r.shadow() || !r.Counts(c.at) || !r.readable() {
						continue
					}
					overridden := decided
					decided = true
					switch {
					case r.Mode != ModeDeny:
					case overridden && r.Automatic:
					case overridden:
						c.Removed = append(c.Removed, r)
					case r.ValidUntil == nil:
						c.none = "the key is already banned, without an end"
					case r.ValidUntil.After(ends):
						c.none = "the key is already banned, until " + cli.Instant(*r.ValidUntil)
					case !r.Automatic:
						c.Removed = append(c.Removed, r)
					}
				}
				if c.none != "" {
					c.Removed = []PolicyRow{}
					return nil
				}
				c.Added = &PolicyRow{Limiter: args[0], Key: to.Key, Mode: ModeDeny, Comment: comment,
					ValidFrom: &c.at, ValidUntil: &ends}
				return nil
			})
		}),
	}
	cmd.Flags().Var(&lasts, "for", "how long, like 90m or 7d")
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
