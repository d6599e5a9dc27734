package limitertest

import (
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// PolicyTexts returns policies, keyed by the text that String returns for them.
func PolicyTexts() map[string]ratelimit.Policy {
	return map[string]ratelimit.Policy{
		"fixed 100/1m":                  ratelimit.FixedWindow{Limit: 100, Window: time.Minute},
		"sliding 100/1m":                ratelimit.SlidingWindow{Limit: 100, Window: time.Minute},
		"log 100/1m":                    ratelimit.SlidingLog{Limit: 100, Window: time.Minute},
		"bucket 20 5/10s":               ratelimit.TokenBucket{Capacity: 20, Refill: 5, Every: 10 * time.Second},
		"fixed 1/1h":                    ratelimit.FixedWindow{Limit: 1, Window: time.Hour},
		"fixed 1/1h30m":                 ratelimit.FixedWindow{Limit: 1, Window: 90 * time.Minute},
		"fixed 1/1h0m30s":               ratelimit.FixedWindow{Limit: 1, Window: time.Hour + 30*time.Second},
		"fixed 1/10m30s":                ratelimit.FixedWindow{Limit: 1, Window: 10*time.Minute + 30*time.Second},
		"fixed 1/1d":                    ratelimit.FixedWindow{Limit: 1, Window: 24 * time.Hour},
		"fixed 1/30d":                   ratelimit.FixedWindow{Limit: 1, Window: 30 * 24 * time.Hour},
		"fixed 1/36h":                   ratelimit.FixedWindow{Limit: 1, Window: 36 * time.Hour},
		"fixed 1/1µs":                   ratelimit.FixedWindow{Limit: 1, Window: time.Microsecond},
		"sliding 1/1.5s":                ratelimit.SlidingWindow{Limit: 1, Window: 1500 * time.Millisecond},
		"sliding 1/20ms":                ratelimit.SlidingWindow{Limit: 1, Window: 20 * time.Millisecond},
		"fixed 4611686018427387904/1µs": ratelimit.FixedWindow{Limit: model.MaxProduct, Window: time.Microsecond},

		"every 1000/month Europe/Berlin":                 ratelimit.CalendarWindow{Limit: 1000, Unit: ratelimit.CalendarMonth, Zone: "Europe/Berlin"},
		"every 1000/month":                               ratelimit.CalendarWindow{Limit: 1000, Unit: ratelimit.CalendarMonth},
		"every 1/week America/Argentina/San_Juan":        ratelimit.CalendarWindow{Limit: 1, Unit: ratelimit.CalendarWeek, Zone: "America/Argentina/San_Juan"},
		"every 1/day America/Port-au-Prince":             ratelimit.CalendarWindow{Limit: 1, Unit: ratelimit.CalendarDay, Zone: "America/Port-au-Prince"},
		"every 4611686018427387904/hour Pacific/Chatham": ratelimit.CalendarWindow{Limit: model.MaxProduct, Unit: ratelimit.CalendarHour, Zone: "Pacific/Chatham"},
		"concurrent 5":                                   ratelimit.Concurrency{Limit: 5},
		"concurrent 1000000":                             ratelimit.Concurrency{Limit: model.MaxSlots},
		"every 100/1m":                                   ratelimit.FixedWindow{Limit: 100, Window: time.Minute, Align: true},
		"every 5/30d":                                    ratelimit.FixedWindow{Limit: 5, Window: 30 * 24 * time.Hour, Align: true},
		"every 4611686018427387904/1µs":                  ratelimit.FixedWindow{Limit: model.MaxProduct, Window: time.Microsecond, Align: true},
		"every 1/minute Etc/UTC":                         ratelimit.CalendarWindow{Limit: 1, Unit: ratelimit.CalendarMinute, Zone: "Etc/UTC"},
	}
}

// OtherPolicyTexts returns texts that ParsePolicy also reads, with the text that String returns.
func OtherPolicyTexts() map[string]string {
	return map[string]string{
		" fixed\t100/60s ":       "fixed 100/1m",
		"sliding 100/1m0s":       "sliding 100/1m",
		"sliding 0100/1us":       "sliding 100/1µs",
		"bucket  20   5/10000ms": "bucket 20 5/10s",
		"fixed 1/1d12h":          "fixed 1/36h",
		"fixed 1/24h":            "fixed 1/1d",
		"every 5/day UTC":        "every 5/day",
		" every  05/week\tUTC ":  "every 5/week",
		" every  05/24h0m ":      "every 5/1d",
		" concurrent \t +05 ":    "concurrent 5",
	}
}

// UnreadablePolicyTexts returns texts that ParsePolicy does not read, with a part of the error.
func UnreadablePolicyTexts() map[string]string {
	return map[string]string{
		"":                             "is empty",
		"  ":                           "is empty",
		"100/1m":                       `"100/1m" is no algorithm`,
		"Fixed 100/1m":                 `"Fixed" is no algorithm`,
		"leaky 100/1m":                 `"leaky" is no algorithm`,
		"fixed":                        "has 0 words",
		"concurrent":                   "has 0 words",
		"concurrent 5/1m":              `"5/1m" is not a whole number`,
		"concurrent 5 5":               "has 2 words",
		"concurrent 1e3":               `"1e3" is not a whole number`,
		"fixed 100 1m":                 "has 2 words",
		"fixed 100":                    "no slash",
		"fixed 100/m":                  `"m" is not a duration`,
		"fixed 100/":                   `"" is not a duration`,
		"fixed 100/60":                 `"60" is not a duration`,
		"fixed 100/d":                  `"d" is not a duration`,
		"fixed 100/1.5d":               `"1.5d" is not a duration`,
		"fixed 100/-1d":                `"-1d" is not a duration`,
		"fixed 100/1d-1h":              `"1d-1h" is not a duration`,
		"fixed 100/1h1d":               `"1h1d" is not a duration`,
		"fixed 100/106752d":            "at most 292 years",
		"fixed 100/106751d24h":         "at most 292 years",
		"fixed 1/99999999999h":         "at most 292 years",
		"fixed 1e3/1m":                 `"1e3" is not a whole number`,
		"fixed 9223372036854775808/1m": "at most 9223372036854775807",
		"fixed 1/1m/1m":                `"1m/1m" is not a duration`,
		"sliding 100/1m 5":             "has 2 words",
		"log 100":                      "no slash",
		"bucket 20":                    "has 1 words",
		"bucket x 5/10s":               `"x" is not a whole number`,
		"bucket 20 x/10s":              `"x" is not a whole number`,
		"every":                        "has 0 words",
		"every 5/day Europe/Berlin x":  "has 3 words",
		"every 5":                      "no slash",
		"every x/day":                  `"x" is not a whole number`,
		"every 5/1d UTC":               `"1d" is not "minute", "hour", "day", "week" or "month", and only these have`,
		"every 5/1d epoch":             `"epoch" is no time zone`,
		"every 5/day epoch":            `"epoch" is no time zone`,
		"every 5/Day":                  `"Day" is not "minute"`,
		"every 5/60":                   "and no duration like 10s",
		"every day":                    "no slash",
		"fixed 5/day":                  `is not a duration`,
		"fixed 5/1d UTC":               "has 2 words",
	}
}

// ImpossiblePolicyTexts returns texts of invalid policies, with the field that New names in its error.
func ImpossiblePolicyTexts() map[string]string {
	return map[string]string{
		"fixed 0/1m":                     "Policy.Limit",
		"sliding -5/1m":                  "Policy.Limit",
		"fixed 100/0s":                   "Policy.Window",
		"fixed 100/1ns":                  "Policy.Window",
		"fixed 1/-1h":                    "Policy.Window",
		"fixed 1/30000d":                 "Policy.Window",
		"sliding 9223372036854775807/1m": "Policy.Limit",
		"log 1001/1m":                    "Policy.Limit",
		"bucket 0 5/10s":                 "Policy.Capacity",
		"bucket 20 0/10s":                "Policy.Refill",
		"every 0/day":                    "Policy.Limit",
		"every 0/1d":                     "Policy.Limit",
		"every 5/0s":                     "Policy.Window",
		"every 5/1ns":                    "Policy.Window",
		"every 5/30000d":                 "Policy.Window",
		"every 4611686018427387905/1s":   "Policy.Limit",
		"concurrent 0":                   "Policy.Limit",
		"concurrent 1000001":             "Policy.Limit",
		"every 4611686018427387905/day":  "Policy.Limit",
		"every 5/day CET":                "Policy.Zone",
		"every 5/day EST5EDT":            "Policy.Zone",
		"every 5/day <+03>-3":            "Policy.Zone",
		"every 5/day Etc/GMT+3":          "Policy.Zone",
		"every 5/day Japan":              "Policy.Zone",
		"every 5/day Europe/Berlin3":     "Policy.Zone",
		"every 5/day europe/berlin":      "Policy.Zone",
		"every 5/day Local":              "Policy.Zone",
	}
}

// FuzzedPolicyTexts returns the seed corpus of FuzzParsePolicy.
func FuzzedPolicyTexts() []string {
	return []string{
		"fixed 100/1m", "sliding 100/1h30m", "log 1000/1h30m", "bucket 20 5/10s", "fixed 1/30d", "fixed 1/1d12h", "sliding 1/1.000001s", "concurrent 5",
		"fixed 1/.5s", "every 1000/month Europe/Berlin", "every 5/day", "every 5/hour America/Port-au-Prince", "every 5/90s", "every 5/1d epoch",
		"every 1/minute UTC",
		"", "bucket", "fixed /", "fixed 1/d", "fixed 100/106751d23h47m16.854775807s", "fixed -1/-1s",
		"fixed 4611686018427387904/1µs",
	}
}
