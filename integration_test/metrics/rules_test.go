package metrics

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// ruleNames are the alerts of deploy/prometheus-rules.yml.
func ruleNames(t *testing.T) (names []string) {
	t.Helper()
	content, err := os.ReadFile(deploy + "prometheus-rules.yml")
	require.NoError(t, err)
	var rules struct {
		Groups []struct{ Rules []struct{ Alert string } }
	}
	require.NoError(t, yaml.Unmarshal(content, &rules))
	for _, group := range rules.Groups {
		for _, rule := range group.Rules {
			names = append(names, rule.Alert)
		}
	}
	require.NotEmpty(t, names)
	return names
}

// promtool comes with Prometheus. It must report no errors, and the alerts must fire as rules_test.yml expects.
func TestRules(t *testing.T) {
	t.Parallel()

	promtool := program(t, "promtool")
	for _, args := range [][]string{
		{"check", "config", deploy + "prometheus.yml"},
		{"check", "rules", deploy + "prometheus-rules.yml"},
		{"test", "rules", "rules_test.yml"},
	} {
		output, err := exec.CommandContext(t.Context(), promtool, args...).CombinedOutput()
		require.NoError(t, err, "%v:\n%s", args, output)
	}
}

// docs/operating.md explains each alert, and rules_test.yml makes each alert fire.
func TestAlertsAreExplained(t *testing.T) {
	t.Parallel()

	explained := named(t, docs+"operating.md", "(?m)^\\| `(\\w+)` \\|")
	fire := named(t, "rules_test.yml", `alertname: (\w+)\n +exp_alerts:\n`)
	for _, name := range ruleNames(t) {
		require.True(t, explained[name], "docs/operating.md does not explain %s", name)
		require.True(t, fire[name], "%s never fires in rules_test.yml", name)
	}
}
