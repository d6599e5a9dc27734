// Package metrics tests deploy/prometheus.yml, deploy/prometheus-rules.yml and deploy/grafana-dashboard.json. A real
// Prometheus scrapes an application with busy limiters. Every query of the dashboard and every alert must have a
// result.
//
// With RATELIMIT_TEST_DRAW=1 the dashboard's test takes two minutes and redraws docs/dashboard.svg.
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

	// patience is the longest wait for something that is certain to come.
	patience = 2 * time.Minute

	// drawVariable makes the test write the chart.
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

// program finds a program from Debian's package prometheus.
func program(t *testing.T, name string) string {
	t.Helper()
	path := testkit.Program(name)
	if path == "" {
		t.Skip("Prometheus: install it (Debian: prometheus)")
	}
	return path
}
