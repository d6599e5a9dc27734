package main

import (
	"errors"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// policyValue is a flag whose value is a policy.
type policyValue struct{ ratelimit.Policy }

var _ pflag.Value = (*policyValue)(nil)

func (v *policyValue) Set(text string) (err error) {
	v.Policy, err = ratelimit.ParsePolicy(text)
	return err
}

func (v *policyValue) String() string {
	if v.Policy == nil {
		return ""
	}
	return v.Policy.String()
}

func (*policyValue) Type() string { return "policy" }

// addPolicy adds the flag --policy, without which the command does not run.
func addPolicy(cmd *cobra.Command, policy *policyValue) {
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

// policiesValue is a flag that gives policies to limiters by their names.
type policiesValue map[string]ratelimit.Policy

var _ pflag.Value = policiesValue{}

func (v policiesValue) Set(text string) error {
	i := strings.LastIndexByte(text, '=') // the last one, since a name may have one too
	if i < 1 {
		return errors.New(`it has to look like "login=sliding 100/1m"`)
	}
	policy, err := ratelimit.ParsePolicy(text[i+1:])
	v[text[:i]] = policy
	return err
}

func (policiesValue) String() string { return "" }
func (policiesValue) Type() string   { return "name=policy" }

func addDurable(cmd *cobra.Command, durable *bool) {
	cmd.Flags().BoolVar(durable, "durable", false,
		"the limiter's rows are in rate_limit_durable, not in rate_limit_ephemeral")
}
