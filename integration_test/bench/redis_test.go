package bench

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// redisServer is a throwaway Redis.
type redisServer struct {
	near, far string // the addresses of the near and the far way
	pid       int
	version   string
}

// redisScript starts the server with the given arguments, prints its process id, and kills it when standard input ends.
// The operating system ends standard input when this process ends in any way. Ctrl-C must not end the script earlier.
const redisScript = `
trap '' HUP INT TERM
"$@" >/dev/null 2>&1 &
echo $!
cat >/dev/null
kill -KILL $!
wait
`

// startRedis starts a Redis that stores nothing on disk, and stops it at the end of the benchmark. It returns nil if
// this machine has no Redis.
func startRedis(b *testing.B) *redisServer {
	b.Helper()
	program, err := exec.LookPath("redis-server")
	if err != nil {
		return nil
	}
	address := testkit.FreeAddress(b)
	host, port, err := net.SplitHostPort(address)
	require.NoError(b, err)

	script := exec.Command("/bin/sh", "-c", redisScript, "redis", program,
		"--bind", host, "--port", port, "--save", "", "--appendonly", "no")
	script.Dir = os.TempDir() // Redis would write files here
	life, err := script.StdinPipe()
	require.NoError(b, err)
	output, err := script.StdoutPipe()
	require.NoError(b, err)
	require.NoError(b, script.Start())
	b.Cleanup(func() {
		require.NoError(b, life.Close())
		require.NoError(b, script.Wait())
	})
	line, err := bufio.NewReader(output).ReadString('\n')
	require.NoError(b, err)
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(b, err)

	s := &redisServer{near: address, far: startDelayProxy(b, address, farAway), pid: pid}
	client := redis.NewClient(&redis.Options{Addr: address})
	defer client.Close()
	var info string
	require.Eventually(b, func() bool {
		info, err = client.Info(b.Context(), "server").Result()
		return err == nil
	}, 10*time.Second, 20*time.Millisecond, "redis-server does not answer")
	for line := range strings.Lines(info) {
		if version, ok := strings.CutPrefix(line, "redis_version:"); ok {
			s.version = strings.TrimSpace(version)
		}
	}
	return s
}

// redisRate returns redis_rate on a client with these options. The subject uses a Redis database of its own.
func redisRate(title string, database int, options redis.Options, autoPipeline bool) *subject {
	open := func(a *arena, data dataset) *store {
		s := &store{data: data}
		if a.redis == nil {
			s.missing = "there is no redis-server on PATH"
			return s
		}
		s.connect = func(far bool) *contender {
			options := options
			options.DB = database
			options.Addr = a.redis.near
			if far {
				options.Addr = a.redis.far
			}
			client := redis.NewClient(&options)
			a.b.Cleanup(func() { _ = client.Close() })
			limiter := redis_rate.NewLimiter(client)
			if autoPipeline {
				pipeliner, err := client.AutoPipeline()
				require.NoError(a.b, err)
				limiter = redis_rate.NewLimiter(pipeliner)
			}
			limit := redis_rate.Limit{Rate: int(data.limit), Burst: int(data.limit), Period: window}
			return &contender{
				pids: func() []int { return []int{a.redis.pid} },
				take: func(ctx context.Context, key string) (bool, error) {
					result, err := limiter.Allow(ctx, key, limit)
					if err != nil {
						return false, fmt.Errorf("redis_rate: %w", err)
					}
					return result.Allowed == 1, nil
				},
			}
		}
		return s
	}
	return &subject{title: title, open: open}
}
