package ratelimit

import (
	"context"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Reset makes key as good as new. Under [All] it does so for one policy after the other. If somebody takes
// meanwhile, as the first for a long time, some policies may count that and others not. Errors: as Allow.
func (l *Limiter) Reset(ctx context.Context, key string) error {
	if err := checkKey(key); err != nil {
		return err
	}
	d := l.client.database
	if !d.pooled() {
		if err := d.turn.Take(ctx); err != nil {
			return gaveUp(err)
		}
		defer d.turn.Pass()
		defer l.waiting.wakeUp(key)
		return l.reset(ctx, d.db, key, callersTransaction(d.db))
	}
	if err := ctx.Err(); err != nil {
		return gaveUp(err)
	}
	done := make(chan error, 1)
	go func() {
		wait := l.client.batcher.held.patience() / time.Duration(len(l.models)) // for each of the key's rows
		err := l.reset(ctx, d.db, key, transaction{lockTimeout: lockTimeout(wait)})
		l.waiting.wakeUp(key)
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return gaveUp(ctx.Err())
	}
}

func (l *Limiter) reset(ctx context.Context, db DBTX, key string, tx transaction) error {
	if err := ctx.Err(); err != nil {
		return gaveUp(err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.client.config.Timeout)
	defer cancel()
	names := make([]string, max(len(l.models), len(l.knownInForce(key).models)))
	for i := range names {
		names[i] = algorithm.RowName(l.space.name, i)
	}
	err := l.client.database.deleteRows(ctx, db, l.space, names, key, tx)
	for tx.own() && pg.OtherShard(err) { // the key's shard is being divided
		if sleep(ctx, mapPause); ctx.Err() != nil {
			break
		}
		err = l.client.database.deleteRows(ctx, db, l.space, names, key, tx)
	}
	if denials := l.client.batcher.denials; denials != nil {
		denials.forget(l.space, key, nil) // even after an error: the key may have been reset
	}
	l.client.batcher.leases.forget(l.space, key)
	if tx.own() {
		l.space.announce(key)
	}
	return err
}
