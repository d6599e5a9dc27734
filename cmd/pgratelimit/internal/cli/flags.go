package cli

import (
	"errors"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// PolicyValue is a flag whose value is a policy.
type PolicyValue struct{ ratelimit.Policy }

var _ pflag.Value = (*PolicyValue)(nil)

func (v *PolicyValue) Set(text string) (err error) {
	v.Policy, err = ratelimit.ParsePolicy(text)
	return err
}

func (v *PolicyValue) String() string {
	if v.Policy == nil {
		return ""
	}
	return v.Policy.String()
}

func (*PolicyValue) Type() string { return "policy" }

// AddPolicy adds the flag --policy, which is required.
func AddPolicy(cmd *cobra.Command, policy *PolicyValue) {
	cmd.Flags().Var(policy, "policy", "limit of each key, like "+algorithm.Examples())
	cobra.CheckErr(cmd.MarkFlagRequired("policy"))
	cobra.CheckErr(cmd.RegisterFlagCompletionFunc("policy",
		cobra.FixedCompletions(policyExamples(), cobra.ShellCompDirectiveNoFileComp)))
}

func policyExamples() []string {
	var examples []string
	for _, a := range algorithm.All() {
		examples = append(examples, a.Example)
	}
	return examples
}

// PoliciesValue is a flag that assigns policies to limiters, such as "login=sliding 10/1m".
type PoliciesValue map[string]ratelimit.Policy

var _ pflag.Value = PoliciesValue{}

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
