package soak

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"runtime/metrics"
	"slices"
	"time"
)

// soakSample is the state of the server and of this process at one time. Counters start at the beginning of the soak.
type soakSample struct {
	At             float64 `json:"at_s"`
	EphemeralBytes int64   `json:"ephemeral_bytes"`
	DurableBytes   int64   `json:"durable_bytes"`
	IndexBytes     int64   `json:"index_bytes"`
	Rows           int64   `json:"rows"`
	DeadTuples     int64   `json:"dead_tuples"`
	Updates        int64   `json:"updates"`
	HOTUpdates     int64   `json:"hot_updates"`
	TransactionIDs int64   `json:"transaction_ids"`
	Connections    int64   `json:"connections"`
	Goroutines     int64   `json:"goroutines"`
	HeapBytes      int64   `json:"heap_bytes"` // bytes in use after the last garbage collection
	Calls          int64   `json:"calls"`
}

const soakSampleQL = `
	SELECT pg_catalog.pg_relation_size('rate_limit_ephemeral'), pg_catalog.pg_relation_size('rate_limit_durable'),
		pg_catalog.pg_relation_size('rate_limit_ephemeral_pkey') + pg_catalog.pg_relation_size('rate_limit_durable_pkey'),
		(SELECT count(*) FROM rate_limit_ephemeral) + (SELECT count(*) FROM rate_limit_durable),
		s.dead, s.updates, s.hot,
		pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
		(SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')
	FROM (
		SELECT sum(n_dead_tup)::bigint AS dead, sum(n_tup_upd)::bigint AS updates, sum(n_tup_hot_upd)::bigint AS hot
		FROM pg_stat_user_tables WHERE relname IN ('rate_limit_ephemeral', 'rate_limit_durable')
	) AS s`

// sample takes samples until the context ends. It leaves out a sample if the server does not answer.
func (s *soak) sample(ctx context.Context, every time.Duration) {
	// A crash resets the server's statistics, so total adds up the counts of all lives.
	total := func() func(now int64) int64 {
		var last, sum int64
		return func(now int64) int64 {
			if now < last {
				last = 0
			}
			sum += now - last
			last = now
			return sum
		}
	}
	updates, hot := total(), total()
	for soakWait(ctx, every) {
		var now soakSample
		short, cancel := context.WithTimeout(ctx, every)
		err := s.take(short, &now)
		cancel()
		if err != nil {
			continue
		}
		now.Updates, now.HOTUpdates = updates(now.Updates), hot(now.HOTUpdates)
		s.mu.Lock()
		now.At = time.Since(s.began).Seconds()
		s.samples = append(s.samples, now)
		s.mu.Unlock()
	}
}

// take takes one sample. It corrects the counters that a crash resets.
func (s *soak) take(ctx context.Context, now *soakSample) error {
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)
	now.HeapBytes, now.Goroutines, now.Calls = int64(
		live[0].Value.Uint64(),
	), int64(
		runtime.NumGoroutine(),
	), s.calls.Load()
	return s.extra.QueryRow(ctx, soakSampleQL).Scan(&now.EphemeralBytes, &now.DurableBytes, &now.IndexBytes, &now.Rows,
		&now.DeadTuples, &now.Updates, &now.HOTUpdates, &now.TransactionIDs, &now.Connections)
}

// soakLeaks returns the quantities that were larger in the second half of a long soak than in the first half. It leaves
// out the first tenth, in which everything starts at zero.
//
// With a steady leak, the mean of the second half is 2.4 times the mean of the first half, because the middles of the
// halves are at 0.775 and 0.325 of the time. Without a leak, the halves differ only by chance, because both have the
// same faults. So soakLeaks allows a factor of 1.5. A difference below slack is too small to matter.
func soakLeaks(samples []soakSample) (found []string) {
	samples = samples[len(samples)/10:]
	first, second := samples[:len(samples)/2], samples[len(samples)/2:]
	for _, quantity := range []struct {
		name  string
		slack float64
		of    func(s soakSample) int64
	}{
		{"bytes of rate_limit_ephemeral", 1 << 20, func(s soakSample) int64 { return s.EphemeralBytes }},
		{"bytes of rate_limit_durable", 1 << 20, func(s soakSample) int64 { return s.DurableBytes }},
		{"bytes of the indexes", 1 << 20, func(s soakSample) int64 { return s.IndexBytes }},
		{"rows", 1000, func(s soakSample) int64 { return s.Rows }},
		{"dead tuples", 2000, func(s soakSample) int64 { return s.DeadTuples }},
		{"connections", 5, func(s soakSample) int64 { return s.Connections }},
		{"goroutines", 20, func(s soakSample) int64 { return s.Goroutines }},
		{"bytes of the heap", 4 << 20, func(s soakSample) int64 { return s.HeapBytes }},
	} {
		mean := func(samples []soakSample) (mean float64) {
			for _, s := range samples {
				mean += float64(quantity.of(s)) / float64(len(samples))
			}
			return mean
		}
		if before, after := mean(first), mean(second); after > before*1.5+quantity.slack {
			found = append(
				found,
				fmt.Sprintf("%s: %.0f in the first half, %.0f in the second", quantity.name, before, after),
			)
		}
	}

	// Counters grow all the time, so their rates are compared.
	ratio := func(samples []soakSample, of, by func(s soakSample) int64) float64 {
		last := samples[len(samples)-1]
		return float64(of(last)-of(samples[0])) / float64(max(by(last)-by(samples[0]), 1))
	}
	calls := func(s soakSample) int64 { return s.Calls }
	ids := func(s soakSample) int64 { return s.TransactionIDs }
	if before, after := ratio(first, ids, calls), ratio(second, ids, calls); after > before*1.5 {
		found = append(
			found,
			fmt.Sprintf("transaction ids for each call: %.2f in the first half, %.2f in the second", before, after),
		)
	}
	updates := func(s soakSample) int64 { return s.Updates }
	hot := func(s soakSample) int64 { return s.HOTUpdates }
	if before, after := ratio(first, hot, updates), ratio(second, hot, updates); after < before-0.1 {
		found = append(
			found,
			fmt.Sprintf("HOT updates: %.0f %% in the first half, %.0f %% in the second", 100*before, 100*after),
		)
	}
	return found
}

// write writes the results into a folder.
func (s *soak) write(folder string, length time.Duration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.SortFunc(s.events, func(a, b soakEvent) int { return cmp.Compare(a.At, b.At) })
	svg, err := s.chart(length)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(folder, "soak.svg"), svg, 0o644); err != nil {
		return err
	}
	text, err := json.Marshal(map[string]any{
		"date": s.began.UTC().
			Format("2006-01-02 15:04 UTC"),
		"length": length.String(), "seed": s.seed, "totals": s.counters(),
		"violations": s.violations, "faults": s.events, "samples": s.samples,
	})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, "soak.json"), append(text, '\n'), 0o644)
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
