package ratelimit

import (
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// TokenBucket holds up to Capacity tokens, and starts full. During each Every, the bucket evenly gets Refill new
// tokens. A request of cost n takes n tokens, or none if there are fewer. So a bucket admits bursts of Capacity, and in
// the long run Refill per Every. Nothing is rounded: a bucket counts units of 1/Every(µs) of a token, and gets Refill
// units in each microsecond.
//
// With TokenBucket{Capacity: 20, Refill: 5, Every: 10 * time.Second}, a new key may take 20 at once. Then the key gets
// one more every 2 s, as RetryAfter says. Its bucket is full again 40 s after the last request.
type TokenBucket struct {
	Capacity int64         // the largest burst: at least 1, and Capacity × Every in microseconds at most 2^62
	Refill   int64         // the tokens that flow in during Every: at least 1
	Every    time.Duration // whole microseconds, at least 1; filling the bucket may take 2^51 µs (71 years) at most
}

func (p TokenBucket) String() string { return p.one().Numbers().String() }

func (p TokenBucket) one() model.Rules     { return model.TokenBucket(p) }
func (p TokenBucket) rules() []model.Rules { return []model.Rules{p.one()} }

func (p TokenBucket) validate() error {
	if p.Capacity < 1 {
		return &ConfigError{
			Field: "Config.Policy.Capacity", Reason: fmt.Sprintf("is %d, and must be at least 1", p.Capacity),
		}
	}
	if p.Refill < 1 {
		return &ConfigError{
			Field: "Config.Policy.Refill", Reason: fmt.Sprintf("is %d, and must be at least 1", p.Refill),
		}
	}
	if err := validateSpan("Config.Policy.Every", p.Every); err != nil {
		return err
	}
	if p.Capacity > model.MaxProduct/model.Micros(p.Every) {
		return &ConfigError{Field: "Config.Policy.Capacity", Reason: fmt.Sprintf(
			"is %d with Every %v, outside the exact range: for this Every it may be at most %d",
			p.Capacity, p.Every, model.MaxProduct/model.Micros(p.Every))}
	}
	if model.CeilDiv(p.Capacity*model.Micros(p.Every), p.Refill) > model.MaxSpan { // the microseconds until it is full
		return &ConfigError{Field: "Config.Policy.Refill", Reason: fmt.Sprintf(
			"is %d every %v, which takes more than 71 years to fill a Capacity of %d", p.Refill, p.Every, p.Capacity)}
	}
	return nil
}
