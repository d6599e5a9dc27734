// Package metrics tests deploy/prometheus.yml, deploy/prometheus-rules.yml and deploy/grafana-dashboard.json: a real
// Prometheus scrapes an application whose limiters have much to tell, and every query of the dashboard and every alert
// has something to show.
//
// With RATELIMIT_TEST_DRAW=1 the test of the dashboard takes two minutes and draws docs/dashboard.svg anew.
package metrics

import (
	"os"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const (
	deploy = "../../deploy/"
	docs   = "../../docs/"

	// patience is how long a test waits at most for what is certain to come.
	patience = 2 * time.Minute

	// drawVariable, if it is set, has the test write the chart.
	drawVariable = "RATELIMIT_TEST_DRAW"
)

// named returns what the group of a pattern matches in a file.
func named(t *testing.T, file, pattern string) map[string]bool {
	t.Helper()
	content, err := os.ReadFile(file)
	require.NoError(t, err)
	found := map[string]bool{}
	for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(string(content), -1) {
		found[match[1]] = true
	}
	return found
}

// program finds a program of Debian's package prometheus.
func program(t *testing.T, name string) string {
	t.Helper()
	path := testkit.Program(name)
	if path == "" {
		t.Skip("Prometheus: install it (Debian: prometheus)")
	}
	return path
}
