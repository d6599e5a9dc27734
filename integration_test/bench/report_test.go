package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// report is the result of a run.
type report struct {
	Date      string             `json:"date"`
	Took      string             `json:"took"`
	Plan      plan               `json:"plan"`
	Machine   []fact             `json:"machine"`
	Results   []*result          `json:"workloads"`
	OneCaller oneCallerResult    `json:"one_caller_in_turn_with_select_1"`
	Denial    cachedDenialResult `json:"cached_denial"`
	Memory    memoryResult       `json:"memory_bytes"`
	Neighbour []*neighbourResult `json:"pgbench"`
}

// fact is information about the machine that a reader of the figures needs.
type fact struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// result has all figures of one workload.
type result struct {
	workload
	Rows []*row `json:"subjects"`
}

// row has the figures of one subject under one workload.
type row struct {
	Subject string    `json:"subject"`
	Ours    bool      `json:"ours"`
	Missing string    `json:"missing,omitempty"`
	Median  figures   `json:"median"`
	Rounds  []figures `json:"rounds"`
}

// figures are the results of one round or their medians, by name. A figure that was not measured is missing.
type figures map[string]float64

const (
	perSecond    = "decisions_per_second"
	p50          = "p50_us"
	p99          = "p99_us"
	serverCPU    = "server_cpu_us_per_decision"
	clientCPU    = "client_cpu_us_per_decision"
	walBytes     = "wal_bytes_per_decision"
	xids         = "transaction_ids_per_decision"
	hotShare     = "hot_percent_of_updates"
	againstRedis = "ratio_to_redis_rate"
	againstAuto  = "ratio_to_auto_pipelining_redis_rate"
	againstPlain = "ratio_to_update_by_key"
)

func newFigures(t tally, c costs, postgres bool) figures {
	f := figures{perSecond: t.perSecond()}
	if len(t.latencies) > 0 {
		f[p50] = microseconds(testkit.Quantile(t.latencies, 0.50))
		f[p99] = microseconds(testkit.Quantile(t.latencies, 0.99))
	}
	total := float64(t.total)
	if c.serverCPU > 0 {
		f[serverCPU] = microseconds(c.serverCPU) / total
	}
	if c.clientCPU > 0 {
		f[clientCPU] = microseconds(c.clientCPU) / total
	}
	if postgres {
		f[walBytes] = float64(c.postgres.wal) / total
		f[xids] = float64(c.postgres.xids) / total
	}
	if c.postgres.updates > 0 {
		f[hotShare] = 100 * float64(c.postgres.hot) / float64(c.postgres.updates)
	}
	return f
}

// finish computes the figures that follow from measured figures.
func (r *report) finish(begun time.Time) {
	r.Date = begun.UTC().Format("2006-01-02 15:04 UTC")
	r.Took = time.Since(begun).Round(time.Second).String()
	for _, result := range r.Results {
		for _, row := range result.Rows {
			row.Median = median(row.Rounds)
		}
		plain := result.redis()
		for _, row := range result.Rows {
			row.against(plain, againstRedis)
			row.against(result.find(redisAuto), againstAuto)
			row.against(result.find(plainUpdate), againstPlain)
		}
	}
}

// against adds, for each round, the ratio of the row's throughput to the other row's, and the median of the ratios.
func (row *row) against(other *row, name string) {
	for i, round := range row.Rounds {
		if value, ok := ratioIn(i, row, other); ok {
			round[name] = value
		}
	}
	if values := row.all(name); len(values) > 0 {
		row.Median[name] = middle(values)
	}
}

// ratioIn returns the ratio in one round. The result ok is false if the other row is missing or its figure is 0.
func ratioIn(round int, row, other *row) (value float64, ok bool) {
	if other == nil || len(other.Rounds) <= round || other.Rounds[round][perSecond] == 0 {
		return 0, false
	}
	return row.Rounds[round][perSecond] / other.Rounds[round][perSecond], true
}

// all returns the values of one figure in all rounds. It returns nothing if the row is missing.
func (row *row) all(name string) (values []float64) {
	if row == nil {
		return nil
	}
	for _, round := range row.Rounds {
		if value, ok := round[name]; ok {
			values = append(values, value)
		}
	}
	return values
}

// median returns the median of each figure.
func median(rounds []figures) figures {
	all := map[string][]float64{}
	for _, round := range rounds {
		for name, value := range round {
			all[name] = append(all[name], value)
		}
	}
	medians := figures{}
	for name, values := range all {
		medians[name] = middle(values)
	}
	return medians
}

// middle returns the median of values, or 0 for an empty list.
func middle(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	if n == 0 {
		return 0
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

func (r *report) result(id string) *result {
	for _, result := range r.Results {
		if result.ID == id {
			return result
		}
	}
	return &result{}
}

func (r *result) find(s *subject) *row {
	for _, row := range r.Rows {
		if row.Subject == s.title && len(row.Rounds) > 0 {
			return row
		}
	}
	return nil
}

// redis returns the row of redis_rate on the plain client, with the faster of its two pools. The result can be nil.
func (r *result) redis() *row {
	pool16, stock := r.find(redisPool16), r.find(redisStock)
	if stock != nil && (pool16 == nil || stock.Median[perSecond] > pool16.Median[perSecond]) {
		return stock
	}
	return pool16
}

func (t tally) perSecond() float64 { return float64(t.measured) / t.elapsed.Seconds() }

func microseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }

// describe returns facts about the machine and the versions.
func (a *arena) describe() []fact {
	a.b.Helper()
	postgres, _, _ := strings.Cut(a.server.Describe(), " from ")
	for _, name := range []string{"shared_buffers", "fsync", "full_page_writes", "synchronous_commit", "max_wal_size", "wal_level"} {
		postgres += fmt.Sprintf(", %s = %s", name, a.setting(name))
	}
	redis := "none on this machine"
	if a.redis != nil {
		redis = a.redis.version + ", without persistence"
	}
	cpu := regexp.MustCompile(`model name\s*: (.*)`).FindStringSubmatch(fileContent("/proc/cpuinfo"))
	load, _, _ := strings.Cut(fileContent("/proc/loadavg"), " ")
	return []fact{
		{"CPU", fmt.Sprintf("%d × %s", runtime.NumCPU(), append(cpu, "unknown", "unknown")[1])},
		{
			"System",
			strings.TrimSpace(runtime.GOOS + "/" + runtime.GOARCH + " " + fileContent("/proc/sys/kernel/osrelease")),
		},
		{"Load average before", load},
		{"Go", runtime.Version()},
		{"Postgres", postgres},
		{"Redis", redis},
		{
			"Clients",
			strings.Join(
				a.versions("jackc/pgx/v5", "redis/go-redis/v9", "go-redis/redis_rate/v10", "golang.org/x/time"),
				", ",
			),
		},
	}
}

func fileContent(path string) string {
	content, _ := os.ReadFile(path)
	return string(content)
}

// versions returns the versions of modules according to this module's go.mod. A test binary does not contain them.
func (a *arena) versions(modules ...string) (all []string) {
	a.b.Helper()
	content := fileContent("../go.mod")
	for _, module := range modules {
		match := regexp.MustCompile(`(?m)^\s*\S*` + regexp.QuoteMeta(module) + ` v\S+`).FindString(content)
		require.NotEmpty(a.b, match, module)
		all = append(all, strings.TrimSpace(match))
	}
	return all
}

// write writes the report into a folder: as text, as data, and as a picture.
func (r *report) write(dir string) error {
	data, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	chart, err := r.chart()
	if err != nil {
		return err
	}
	return errors.Join(
		os.MkdirAll(dir, 0o755),
		os.WriteFile(filepath.Join(dir, "benchmark.md"), []byte(r.markdown()), 0o644),
		os.WriteFile(filepath.Join(dir, "benchmark.json"), append(data, '\n'), 0o644),
		os.WriteFile(filepath.Join(dir, "benchmark.svg"), chart, 0o644),
	)
}
