package metrics

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// promServer is a Prometheus with the configuration in deploy/.
type promServer struct{ url string }

// scrapes is the time between two scrapes. With a short time, the test is short, too.
const scrapes = time.Second

// startPrometheus starts a Prometheus that watches an application and a service at their addresses.
func startPrometheus(t *testing.T, application, service string) *promServer {
	t.Helper()
	binary := program(t, "prometheus")
	dir := t.TempDir()
	read := func(name string) string {
		content, err := os.ReadFile(deploy + name)
		require.NoError(t, err)
		return string(content)
	}
	config := read("prometheus.yml")
	for from, to := range map[string]string{
		"localhost:9464":           application,
		"localhost:8080":           service,
		"scrape_interval: 15s":     "scrape_interval: " + scrapes.String(),
		"evaluation_interval: 15s": "evaluation_interval: " + scrapes.String(),
	} {
		require.Equal(t, 1, strings.Count(config, from), from)
		config = strings.ReplaceAll(config, from, to)
	}
	for name, content := range map[string]string{
		"prometheus.yml": config, "prometheus-rules.yml": read("prometheus-rules.yml"),
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}

	address := testkit.FreeAddress(t)
	p := &promServer{url: "http://" + address}
	ready := func() error {
		response, err := http.Get(p.url + "/-/ready")
		if err == nil {
			err = response.Body.Close()
		}
		if err == nil && response.StatusCode != http.StatusOK {
			err = errors.New(response.Status)
		}
		return err
	}
	testkit.Start(t, ready, binary, "--config.file="+filepath.Join(dir, "prometheus.yml"),
		"--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address)
	return p
}

// get sends a query to Prometheus, and decodes the data of its answer.
func (p *promServer) get(path string, parameters url.Values, data any) error {
	response, err := http.Get(p.url + path + "?" + parameters.Encode())
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer := struct {
		Status, Error string
		Data          any
	}{Data: data}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return err
	}
	if answer.Status != "success" {
		return fmt.Errorf("%s: %s: %s", response.Status, path, answer.Error)
	}
	return nil
}

// waitFor waits until a query has a result.
func (p *promServer) waitFor(t *testing.T, query string) {
	t.Helper()
	require.Eventually(t, func() bool {
		var found struct{ Result []any }
		if err := p.get("/api/v1/query", url.Values{"query": {query}}, &found); err != nil {
			t.Log(err)
		}
		return len(found.Result) > 0
	}, patience, scrapes/4, query)
}

// series is one time series in the result of a query.
type series struct {
	name   string // in the legend
	Metric map[string]string
	Values []point
}

// point is a value at a time, in seconds since 1970.
type point struct{ At, Value float64 }

// UnmarshalJSON reads [1767225600.5, "42"].
func (p *point) UnmarshalJSON(text []byte) error {
	var value string
	if err := json.Unmarshal(text, &[]any{&p.At, &value}); err != nil {
		return err
	}
	var err error
	p.Value, err = strconv.ParseFloat(value, 64)
	return err
}

// over evaluates a query at the time to, and at each scrape between the times from and to.
func (p *promServer) over(t *testing.T, query string, from, to time.Time) []series {
	t.Helper()
	var found struct{ Result []series }
	require.NoError(t, p.get("/api/v1/query_range", url.Values{
		"query": {query},
		"start": {to.Add(-to.Sub(from).Truncate(scrapes)).Format(time.RFC3339Nano)},
		"end":   {to.Format(time.RFC3339Nano)},
		"step":  {fmt.Sprint(scrapes.Seconds())},
	}, &found), query)
	return found.Result
}

// alert is a rule as Prometheus reports it.
type alert struct {
	Name, State string // "inactive", "pending" or "firing"
	Health      string // "ok" if Prometheus could evaluate the rule
	LastError   string
}

func (p *promServer) alerts(t *testing.T) map[string]alert {
	t.Helper()
	var found struct{ Groups []struct{ Rules []alert } }
	require.NoError(t, p.get("/api/v1/rules", nil, &found))
	alerts := map[string]alert{}
	for _, group := range found.Groups {
		for _, rule := range group.Rules {
			alerts[rule.Name] = rule
		}
	}
	return alerts
}
