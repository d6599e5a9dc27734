package service

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
	"github.com/pgratelimit/ratelimit/service/internal/envoy"
	"github.com/pgratelimit/ratelimit/service/internal/settings"
)

// lookEvery is how often the service looks whether files have changed. Links and mounts make notifications of the
// operating system unreliable, and reading a directory takes less than a millisecond.
const lookEvery = 2 * time.Second

// Check returns what is wrong in the files of a configuration directory, or nil. A directory without files is wrong,
// because a service that finds none may look in the wrong place.
func Check(dir string) error {
	files, err := settings.Read(dir)
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("%s has no file whose name ends with .yaml or .yml", dir)
	}
	s, err := settings.Load(files)
	if err != nil {
		return err
	}
	client, err := ratelimit.NewClient(ratelimittest.NewDB(), ratelimit.ClientConfig{})
	if err != nil {
		return err
	}
	_, err = limitersOf(s, client, nil, ratelimit.ReturnError())
	return err
}

// configuration has the limiters of the files in force.
type configuration struct {
	dir       string // "" if there are no files
	client    *ratelimit.Client
	policies  *ratelimit.Policies
	onFailure ratelimit.FailureMode
	envoy     *envoy.Server
	logger    *slog.Logger

	limiters atomic.Pointer[map[string]*ratelimit.Limiter]
	byRow    rowLimiters
	broken   atomic.Bool // whether the files last read are not in force

	files map[string][]byte // as they were last read, or nil after an error
	told  string            // the last error that was logged
}

// load reads the files, and puts them in force if they have changed and are right. If again is true, it also does so if
// they have not changed. Otherwise the files that were in force stay so.
func (c *configuration) load(ctx context.Context, again bool) error {
	files, err := settings.Read(c.dir)
	if err != nil {
		c.files = nil
	} else if again || c.files == nil || !maps.EqualFunc(files, c.files, bytes.Equal) {
		c.files = files
		err = c.apply(ctx, files)
	} else {
		return nil
	}
	if c.broken.Store(err != nil); err != nil {
		c.envoy.LoadFailed()
	}
	return err
}

func (c *configuration) apply(ctx context.Context, files map[string][]byte) error {
	s, err := settings.Load(files)
	if err != nil {
		return err
	}
	limiters, err := limitersOf(s, c.client, c.policies, c.onFailure)
	if err != nil {
		return err
	}
	c.limiters.Store(&limiters)
	c.envoy.Use(s.Envoy)
	c.logger.InfoContext(ctx, "ratelimit: the configuration is in force",
		"files", len(files), "limiters", len(limiters))
	return nil
}

// watch loads files that change, until ctx ends. A value in the channel hangup makes it load all files again.
func (c *configuration) watch(ctx context.Context, hangup <-chan os.Signal) {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	for {
		again := false
		select {
		case <-ctx.Done():
			return
		case <-hangup:
			again = true
		case <-ticker.C:
		}
		c.report(ctx, c.load(ctx, again), again)
	}
}

// report logs each line of an error that is not the error of the time before.
func (c *configuration) report(ctx context.Context, err error, again bool) {
	if err == nil {
		if !c.broken.Load() {
			c.told = ""
		}
		return
	}
	if err.Error() == c.told && !again {
		return
	}
	c.told = err.Error()
	for line := range strings.SplitSeq(c.told, "\n") {
		c.logger.ErrorContext(ctx, "ratelimit: the configuration has a mistake, so the old one stays in force",
			"mistake", line)
	}
}

// limitersOf returns the limiters that files name. Errors: what a limiter cannot be.
func limitersOf(
	s *settings.Settings, client *ratelimit.Client, policies *ratelimit.Policies, onFailure ratelimit.FailureMode,
) (map[string]*ratelimit.Limiter, error) {
	limiters := make(map[string]*ratelimit.Limiter, len(s.Limiters))
	var errs []error
	for name, of := range s.Limiters {
		config := ratelimit.Config{
			Name: name, Policy: of.Policy, Durable: of.Durable, SynchronousCommit: of.SynchronousCommit,
			Policies: policies, OnFailure: onFailure,
		}
		if of.OnFailure != nil {
			config.OnFailure = *of.OnFailure
		}
		l, err := client.Limiter(config)
		if err != nil {
			errs = append(errs, &settings.Error{File: of.File, Line: of.Line, Reason: err.Error()})
			continue
		}
		limiters[name] = l
	}
	return limiters, errors.Join(errs...)
}

// Limiter returns the limiter of a file, or of a row of rate_limit_policy for all keys of a limiter.
func (c *configuration) Limiter(name string) (*ratelimit.Limiter, bool) {
	if l, ok := (*c.limiters.Load())[name]; ok {
		return l, true
	}
	policy, ok := c.policies.Everybody(name)
	if !ok {
		return nil, false
	}
	l, err := c.byRow.limiter(name, policy, func() (*ratelimit.Limiter, error) {
		return c.client.Limiter(ratelimit.Config{
			Name: name, Policy: policy, Policies: c.policies, OnFailure: c.onFailure,
		})
	})
	return l, err == nil
}

// rowLimiters are the limiters whose policies are rows of rate_limit_policy. There are at most as many as rows.
type rowLimiters struct {
	mu     sync.Mutex
	byName map[string]rowLimiter
}

type rowLimiter struct {
	policy  ratelimit.Policy
	limiter *ratelimit.Limiter
}

// limiter returns the limiter of a name. It makes one if there is none, or if the policy has changed since.
func (r *rowLimiters) limiter(
	name string, policy ratelimit.Policy, create func() (*ratelimit.Limiter, error),
) (*ratelimit.Limiter, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known, ok := r.byName[name]; ok && known.policy == policy {
		return known.limiter, nil
	}
	l, err := create()
	if err != nil {
		return nil, err
	}
	if r.byName == nil {
		r.byName = map[string]rowLimiter{}
	}
	r.byName[name] = rowLimiter{policy, l}
	return l, nil
}
