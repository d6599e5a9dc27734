package faults

import (
	"bufio"
	"cmp"
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// operation is one call of a history.
type operation struct {
	Client, Limiter int
	Key             string
	Cost            int64    // 0 for a Peek; negative for a refund or a grant
	Of              *portion // the take to refund; nil means a grant
	Reset           bool
	Call, Return    int64 // microseconds since 1970, by the clock of this machine and its database
	Result          ratelimit.Result
	taken           ratelimit.Result // the result to refund
	Unknown         bool             // the call may have taken something, or may still do so
	after           int              // how many operations locked the row earlier; 0 if unknown
}

// workload describes what one process does.
type workload struct {
	URL          string
	Algorithm    string
	Limit        int64
	Span         time.Duration // the window, the month of the calendar, or the time to fill a bucket
	Durable      bool
	Cache        bool
	DenialMaxAge time.Duration
	Limiters     int // each limiter has its own pool
	Callers      int // of each limiter
	Calls        int // of each caller
	Keys         int
	MaxCost      int64
	Looks        int // Peeks out of 100 calls
	Resets       int
	Refunds      int
	Grants       int
	Leaves       int           // calls out of 100 whose context ends almost at once
	Gap          time.Duration // the pause between two calls of a caller
	Timeout      time.Duration // of calls; the default is too long for any call to reach
	Seed         uint64
	First        int // the number of the first limiter
}

func (w workload) policy() ratelimit.Policy {
	switch w.Algorithm {
	case "fixed window":
		return ratelimit.FixedWindow{Limit: w.Limit, Window: w.Span}
	case "sliding window":
		return ratelimit.SlidingWindow{Limit: w.Limit, Window: w.Span}
	case "sliding log":
		return ratelimit.SlidingLog{Limit: w.Limit, Window: w.Span}
	case "calendar window":
		return ratelimit.CalendarWindow{Limit: w.Limit, Unit: ratelimit.CalendarMonth}
	case "token bucket":
		return ratelimit.TokenBucket{Capacity: w.Limit, Refill: w.Limit, Every: w.Span}
	}
	return nil
}

// run does the work and returns the history. It calls ready once all limiters are connected, and begins when ready
// returns.
func (w workload) run(ctx context.Context, ready func() error) ([]operation, error) {
	limiters := make([]*ratelimit.Limiter, w.Limiters)
	for i := range limiters {
		config, err := pgxpool.ParseConfig(w.URL)
		if err != nil {
			return nil, err
		}
		config.MaxConns = 3
		config.ConnConfig.RuntimeParams["application_name"] = "limiter"
		pool, err := pgxpool.NewWithConfig(ctx, config)
		if err != nil {
			return nil, err
		}
		defer pool.Close() //nolint:revive // all pools stay open until the end
		if err := pool.Ping(ctx); err != nil {
			return nil, err
		}
		client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{
			Timeout: cmp.Or(w.Timeout, amply), DenialMaxAge: w.DenialMaxAge,
		})
		if err != nil {
			return nil, err
		}
		if limiters[i], err = client.Limiter(ratelimit.Config{
			Name: "test", Policy: w.policy(), Durable: w.Durable, NoDenialCache: !w.Cache,
		}); err != nil {
			return nil, err
		}
	}
	if err := ready(); err != nil {
		return nil, err
	}

	histories, errs := make([][]operation, w.Limiters*w.Callers), make([]error, w.Limiters*w.Callers)
	var callers sync.WaitGroup
	for i := range histories {
		callers.Go(func() { histories[i], errs[i] = w.call(ctx, limiters[i%w.Limiters], i) })
	}
	callers.Wait()
	return slices.Concat(histories...), errors.Join(errs...)
}

// call runs one caller.
func (w workload) call(ctx context.Context, limiter *ratelimit.Limiter, caller int) ([]operation, error) {
	random := rand.New(rand.NewPCG(w.Seed, uint64(w.First*w.Callers+caller)))
	var history []operation
	var takes []operation // takes that were not refunded
	for range w.Calls {
		op := operation{
			Client: w.First*w.Callers + caller, Limiter: w.First + caller%w.Limiters,
			Key: keyNumber(random.IntN(w.Keys)), Cost: 1 + random.Int64N(w.MaxCost),
		}
		leaves := random.IntN(100) < w.Leaves
		switch draw := random.IntN(100); {
		case draw < w.Looks:
			op.Cost = 0
		case draw < w.Looks+w.Resets:
			op.Reset = true
		case draw < w.Looks+w.Resets+w.Refunds:
			if len(takes) > 0 {
				i := random.IntN(len(takes))
				of := partsOf(takes[i].Result)[0]
				op.Key, op.Cost, op.Of, op.taken = takes[i].Key, -takes[i].Cost, &of, takes[i].Result
				takes = slices.Delete(takes, i, i+1)
			}
		case draw < w.Looks+w.Resets+w.Refunds+w.Grants:
			op.Cost = -op.Cost
		}
		occurred, err := op.make(ctx, limiter, leaves, time.Duration(random.IntN(2000))*time.Microsecond)
		if err != nil {
			return nil, err
		}
		if occurred {
			history = append(history, op)
			if op.Cost > 0 && !op.Reset && !op.Unknown && op.Result.Allowed {
				takes = append(takes, op)
			}
		}
		if w.Gap > 0 {
			pause(ctx, time.Duration(random.Int64N(int64(2*w.Gap))))
		}
	}
	return history, nil
}

// make makes the call. It returns false for a call that failed and certainly took nothing, because such a call does not
// belong to the history.
func (op *operation) make(
	ctx context.Context,
	limiter *ratelimit.Limiter,
	leaves bool,
	patience time.Duration,
) (occurred bool, err error) {
	callCtx := ctx
	if leaves {
		var cancel context.CancelFunc
		callCtx, cancel = context.WithTimeout(ctx, patience)
		defer cancel()
	}
	op.Call = time.Now().UnixMicro()
	switch {
	case op.Reset:
		err = limiter.Reset(callCtx, op.Key)
	case op.Of != nil:
		op.Result, err = limitertest.AsResult(limiter.Refund(callCtx, op.taken))
	case op.Cost < 0:
		op.Result, err = limitertest.AsResult(limiter.Grant(callCtx, op.Key, -op.Cost))
	default:
		op.Result, err = limiter.AllowN(callCtx, op.Key, op.Cost)
	}
	op.Return = time.Now().UnixMicro()
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, ratelimit.ErrOutcomeUnknown), leaves && errors.Is(err, callCtx.Err()):
		op.Unknown = true
		return op.Cost != 0, nil
	case errors.Is(err, ratelimit.ErrUnavailable), errors.Is(err, ratelimit.ErrTimeout): // the call was never sent
		return false, nil
	}
	return false, err
}

// workVariable is the environment variable with the workload of a child process of this test binary.
const workVariable = "RATELIMIT_TEST_WORK"

// workInChild does the work of a child process. It prints that it is ready, waits for a line on stdin, and writes its
// history to stdout. The output is not JSON, which would not restore the history exactly. It returns the exit code.
func workInChild(work string) int {
	var w workload
	err := json.Unmarshal([]byte(work), &w)
	var history []operation
	if err == nil {
		history, err = w.run(context.Background(), func() error {
			if _, err := fmt.Fprintln(os.Stdout); err != nil {
				return err
			}
			_, err := bufio.NewReader(os.Stdin).ReadString('\n')
			return err
		})
	}
	if err == nil {
		err = gob.NewEncoder(os.Stdout).Encode(history)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// processes is the number of processes that run a workload at once. This process is one of them.
const processes = 2

// runInProcesses runs a workload in several processes on one database, and returns one history.
func (w workload) runInProcesses(t *testing.T, db *pgtest.DB) []operation {
	t.Helper()
	w.URL = cmp.Or(w.URL, db.URL)
	type child struct {
		*exec.Cmd
		stdin  io.WriteCloser
		stdout *bufio.Reader
		stderr strings.Builder
	}
	children := make([]*child, processes-1)
	for i := range children {
		w.First = (i + 1) * w.Limiters
		work, err := json.Marshal(w)
		require.NoError(t, err)
		c := &child{Cmd: exec.CommandContext(t.Context(), os.Args[0])}
		c.Env = append(os.Environ(), workVariable+"="+string(work))
		c.Stderr = &c.stderr
		c.stdin, err = c.StdinPipe()
		require.NoError(t, err)
		stdout, err := c.StdoutPipe()
		require.NoError(t, err)
		c.stdout = bufio.NewReader(stdout)
		require.NoError(t, c.Start())
		children[i] = c
	}

	w.First = 0
	histories := make([][]operation, processes)
	var err error
	histories[0], err = w.run(t.Context(), func() error {
		for _, c := range children {
			if _, err := c.stdout.ReadString('\n'); err != nil {
				return fmt.Errorf("child: %w: %s", err, &c.stderr)
			}
		}
		for _, c := range children {
			if _, err := fmt.Fprintln(c.stdin); err != nil {
				return err
			}
		}
		return nil
	})
	require.NoError(t, err)
	for i, c := range children {
		require.NoError(t, gob.NewDecoder(c.stdout).Decode(&histories[i+1]), &c.stderr)
		require.NoError(t, c.Wait(), &c.stderr)
	}
	return slices.Concat(histories...)
}
