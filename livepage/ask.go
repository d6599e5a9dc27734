package livepage

import (
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/rowsql"
)

const (
	askTimeout = 3 * time.Second
	maxRows    = 50   // the most rows that are shown
	maxPeeked  = 1000 // the most keys whose state is read
)

// answer is what the database has answered.
type answer struct {
	Title    string
	Problem  string
	Headings []string
	Rows     [][]string
	Note     string
}

// answer asks the database one question about a limiter.
func (p *Page) answer(ctx context.Context, ask, name string) *answer {
	a := &answer{Title: ask + " of " + printable(name)}
	i := slices.IndexFunc(p.known(), func(l *ratelimit.Limiter) bool { return l.Config().Name == name })
	questions := map[string]func(context.Context, ratelimit.Config, *answer) error{
		"fullest keys": p.fullest, "bans": p.bans, "holds": p.holds, "slots": p.slots,
	}
	question := questions[ask]
	switch {
	case p.config.DB == nil:
		a.Problem = "This page has no database: see livepage.Config.DB."
		return a
	case i < 0 || question == nil:
		a.Title, a.Problem = "No answer", "There is no such limiter or no such question here."
		return a
	}
	select {
	case p.asking <- struct{}{}:
		defer func() { <-p.asking }()
	default:
		a.Problem = "Somebody else is asking the database. Try again in a moment."
		return a
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	// An error may have text of a key, so only its kind is shown.
	if err := question(ctx, p.known()[i].Config(), a); err != nil {
		a.Rows = nil
		a.Problem = "The database has not answered: " + pg.KindOf(err) +
			". The role of Config.DB needs the rights of rate_limit_reader, and a query may take " +
			askTimeout.String() + "."
	}
	return a
}

// known returns the limiters of AddLimiters.
func (p *Page) known() []*ratelimit.Limiter {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clip(p.limiters)
}

func (p *Page) query(ctx context.Context, sql string, durable bool, args, targets []any, each func() error) error {
	sql = pg.Qualify(rowsql.InTable(sql, durable), p.config.Schema)
	return pg.Query(ctx, p.config.DB, true, sql, args, targets, each)
}

func (p *Page) fullest(ctx context.Context, of ratelimit.Config, a *answer) error {
	a.Headings = []string{"key", "left", "held", "one fits after", "as good as new after"}
	numbers, err := algorithm.Parse(of.Policy.String())
	if err != nil {
		return err
	}
	if len(numbers) > 1 {
		a.Note = "These are the keys of the first policy, " + numbers[0].String() + "."
	}
	var keys []string
	var key string
	if err := p.query(ctx, rowsql.NextKeys, of.Durable, []any{of.Name, "", maxPeeked}, []any{&key}, func() error {
		keys = append(keys, key)
		return nil
	}); err != nil {
		return err
	}
	if len(keys) == maxPeeked {
		a.Note += " These are the fullest of the first " + strconv.Itoa(maxPeeked) + " keys in alphabetical order. " +
			"The command pgratelimit top looks at more."
	}
	if len(keys) == 0 {
		return nil
	}
	type state struct {
		key                      string
		left, held, retry, reset int64
	}
	var states []state
	var ord int64
	var s state
	n := numbers[0]
	err = pg.Query(ctx, p.config.DB, true, pg.Qualify(rowsql.Peek, p.config.Schema), []any{
		of.Name, keys, of.Durable, n.Algorithm, n.Limit, n.Span.Microseconds(), n.Refill, (*time.Time)(nil), n.Zone,
	}, []any{&ord, &s.left, &s.held, &s.retry, &s.reset}, func() error {
		s.key = keys[ord-1]
		if s.reset > 0 {
			states = append(states, s)
		}
		return nil
	})
	slices.SortStableFunc(states, func(a, b state) int {
		if a.left != b.left {
			return int(max(-1, min(1, a.left-b.left)))
		}
		return int(max(-1, min(1, b.retry-a.retry)))
	})
	for _, s := range states[:min(maxRows, len(states))] {
		a.Rows = append(a.Rows, []string{
			p.shown(s.key), strconv.FormatInt(s.left, 10), strconv.FormatInt(s.held, 10), after(s.retry),
			after(s.reset),
		})
	}
	return err
}

func (p *Page) bans(ctx context.Context, of ratelimit.Config, a *answer) error {
	a.Headings = []string{"key", "made by", "ends after"}
	var key string
	var isPrefix, automatic bool
	var left *int64
	return p.query(ctx, rowsql.Bans, false, []any{of.Name, maxRows}, []any{&key, &isPrefix, &automatic, &left},
		func() error {
			row := []string{p.shown(key), "a person", "never"}
			switch {
			case isPrefix && key == "":
				row[0] = "all keys"
			case isPrefix:
				row[0] += " and all that begin like it"
			}
			if automatic {
				row[1] = "a limiter"
			}
			if left != nil {
				row[2] = after(*left)
			}
			a.Rows = append(a.Rows, row)
			return nil
		})
}

func (p *Page) holds(ctx context.Context, of ratelimit.Config, a *answer) error {
	a.Headings = []string{"key", "units", "ends after"}
	var key string
	var units, left int64
	return p.query(ctx, rowsql.Holds, of.Durable, []any{algorithm.RowNames(of.Name), maxRows},
		[]any{&key, &units, &left}, func() error {
			a.Rows = append(a.Rows, []string{p.shown(key), strconv.FormatInt(units, 10), after(left)})
			return nil
		})
}

func (p *Page) slots(ctx context.Context, of ratelimit.Config, a *answer) error {
	a.Headings = []string{"key", "state", "units", "holder", "group", "ends after"}
	var id, name, key, holder, group string
	var waiting bool
	var place, units, weight, made, ends, fence, now, slots, held, places, asked int64
	return p.query(ctx, rowsql.Slots, of.Durable, []any{algorithm.RowNames(of.Name), (*string)(nil), maxRows}, []any{
		&id, &name, &key, &waiting, &place, &units, &holder, &group, &weight, &made, &ends, &fence, &now, &slots, &held,
		&places, &asked,
	}, func() error {
		state := "held"
		if waiting {
			state = "waits, place " + strconv.FormatInt(place, 10)
		}
		if group != "" {
			group = p.shown(group)
		}
		a.Rows = append(a.Rows, []string{
			p.shown(key), state, strconv.FormatInt(units, 10), printable(holder), group, after(ends - now),
		})
		a.Note = strconv.FormatInt(held, 10) + " units are held in " + strconv.FormatInt(slots, 10) + " slots, and " +
			strconv.FormatInt(places, 10) + " wait for " + strconv.FormatInt(asked, 10) + "."
		return nil
	})
}

// after returns a number of microseconds as text.
func after(micros int64) string {
	if micros <= 0 {
		return "now"
	}
	return short(time.Duration(min(micros, 1<<53)) * time.Microsecond)
}
