package cli

import (
	"errors"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// parsed is a flag with a function that parses its text.
type parsed[T any] struct {
	into  *T
	kind  string
	parse func(text string) (T, error)
}

// Parsed returns a flag that sets the variable into. In the help, the word kind stands for the flag's value.
func Parsed[T any](into *T, kind string, parse func(text string) (T, error)) pflag.Value {
	return &parsed[T]{into, kind, parse}
}

func (p *parsed[T]) Set(text string) (err error) {
	*p.into, err = p.parse(text)
	return err
}

func (*parsed[T]) String() string { return "" }
func (p *parsed[T]) Type() string { return p.kind }

func AddPolicy(cmd *cobra.Command, policy *ratelimit.Policy, usage string) {
	cmd.Flags().Var(Parsed(policy, "policy", ratelimit.ParsePolicy), "policy", usage)
}

// RequirePolicy adds the flag --policy, which is required.
func RequirePolicy(cmd *cobra.Command, policy *ratelimit.Policy) {
	AddPolicy(cmd, policy, "limit of each key, like "+algorithm.Examples())
	cobra.CheckErr(cmd.MarkFlagRequired("policy"))
	var examples []string
	for _, a := range algorithm.All() {
		examples = append(examples, a.Example)
	}
	cobra.CheckErr(cmd.RegisterFlagCompletionFunc("policy",
		cobra.FixedCompletions(examples, cobra.ShellCompDirectiveNoFileComp)))
}

// PoliciesValue is a flag that assigns policies to limiters, such as "login=sliding 10/1m".
type PoliciesValue map[string]ratelimit.Policy

func (v PoliciesValue) Set(text string) error {
	i := strings.LastIndexByte(text, '=') // the last =, because the name of a limiter may contain =
	if i < 1 {
		return errors.New(`it has to look like "login=sliding 100/1m"`)
	}
	policy, err := ratelimit.ParsePolicy(text[i+1:])
	v[text[:i]] = policy
	return err
}

func (PoliciesValue) String() string { return "" }
func (PoliciesValue) Type() string   { return "name=policy" }

func AddDurable(cmd *cobra.Command, durable *bool) {
	cmd.Flags().BoolVar(durable, "durable", false,
		"the limiter's rows are in rate_limit_durable, not in rate_limit_ephemeral")
}
