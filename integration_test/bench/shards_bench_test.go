package bench

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
)

// BenchmarkShards measures the CPU time that a decision takes on the servers of four shards and of the proxy. One way
// calls each shard directly in turn. Another way calls the proxy with one shard per statement, as the library does. The
// rounds alternate, and the table has their medians. Run this benchmark alone.
func BenchmarkShards(b *testing.B) {
	const shards, keys, rounds, length = 4, 20_000, 15, 250 * time.Millisecond
	const statement = "SELECT rate_limit_take_sliding_window('bench', $1, 1000000000, 60000000, lock_timeout_ms => 1000)"
	fleet := pgtest.Sharded(b, shards)
	var keysOf [shards][]string
	for i := range keys {
		key := fmt.Sprint("user:", i)
		shard := shardkey.Of(key, shards)
		keysOf[shard] = append(keysOf[shard], key)
	}
	proxy := pgtest.Connect(b, fleet.DB)
	var direct []*pgx.Conn
	for _, shard := range fleet.Shards {
		direct = append(direct, pgtest.Connect(b, shard))
	}
	// call makes requests for n keys of a shard.
	call := func(conn *pgx.Conn, shard, n int) {
		asked := make([]string, n)
		for i, place := range rand.Perm(len(keysOf[shard]))[:n] {
			asked[i] = keysOf[shard][place]
		}
		slices.SortFunc(asked, func(a, b string) int { return cmp.Or(len(b)-len(a), strings.Compare(a, b)) })
		tag, err := conn.Exec(b.Context(), statement, asked)
		require.NoError(b, err)
		require.EqualValues(b, 1, tag.RowsAffected())
	}
	ways := []struct {
		name string
		conn func(shard int) *pgx.Conn
	}{
		{"directly", func(shard int) *pgx.Conn { return direct[shard] }},
		{"through the proxy", func(int) *pgx.Conn { return proxy }},
	}
	for _, way := range ways { // warms up until all sessions have their plans
		for i := range 40 * shards {
			call(way.conn(i%shards), i%shards, 1+i%2*31)
		}
	}
	backends := func(db *pgtest.DB) (pids []int) {
		rows, err := db.Pool.Query(b.Context(), `SELECT pid FROM pg_stat_activity
			WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()`)
		require.NoError(b, err)
		pids, err = pgx.CollectRows(rows, pgx.RowTo[int])
		require.NoError(b, err)
		return pids
	}
	onProxy := backends(fleet.DB)
	var onShards []int
	for _, shard := range fleet.Shards {
		onShards = append(onShards, backends(shard)...)
	}

	table := "\n| CPU in us of a decision | 1 | 32 | 256 |\n|---|---|---|---|\n"
	var cells [4]string
	for _, n := range []int{1, 32, 256} {
		var shardCosts, proxyCosts [2][]float64
		for range rounds {
			for w, way := range ways {
				shardsBefore, proxyBefore := cpu(b, onShards), cpu(b, onProxy)
				decisions := 0
				for began := time.Now(); time.Since(began) < length; {
					for shard := range shards {
						call(way.conn(shard), shard, n)
						decisions += n
					}
				}
				shardCosts[w] = append(shardCosts[w], (cpu(b, onShards)-shardsBefore)/float64(decisions))
				proxyCosts[w] = append(proxyCosts[w], (cpu(b, onProxy)-proxyBefore)/float64(decisions))
			}
		}
		median := func(costs []float64) float64 {
			slices.Sort(costs)
			return costs[len(costs)/2]
		}
		base, shard, own := median(shardCosts[0]), median(shardCosts[1]), median(proxyCosts[1])
		for i, cell := range []string{
			fmt.Sprintf("%.1f", base), fmt.Sprintf("%.1f", shard), fmt.Sprintf("%.2f", shard/base), fmt.Sprintf("%.1f", own),
		} {
			cells[i] += " | " + cell
		}
	}
	for i, row := range []string{"shards, asked directly", "shards, through the proxy", "… over that", "proxy"} {
		table += "| " + row + cells[i] + " |\n"
	}
	b.Log(table)
}

// cpu returns the CPU time of processes in microseconds.
func cpu(b *testing.B, pids []int) (sum float64) {
	b.Helper()
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
		require.NoError(b, err)
		var ns int64
		_, err = fmt.Sscan(string(text), &ns)
		require.NoError(b, err)
		sum += float64(ns) / 1000
	}
	return sum
}
