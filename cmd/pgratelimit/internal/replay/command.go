package replay

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/internal/algorithm"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// Report is the result of a replay.
type Report struct {
	Lines Lines      `json:"lines"`
	From  *time.Time `json:"from"` // null if there is no request
	To    *time.Time `json:"to"`
	Keys  int64      `json:"keys"`
	// KeysForgotten is how many keys were idle and had to make room. One that came back is counted once more.
	KeysForgotten int64      `json:"keys_forgotten"`
	Busiest       float64    `json:"busiest_share"` // the share of the requests that the busiest 1 % of the keys made
	Groups        []KeyGroup `json:"keys_by_requests"`
	Policies      []Totals   `json:"policies"`
	Sweep         *Sweep     `json:"sweep,omitempty"`
}

// KeyGroup is how many keys made more requests than the group before, and at most UpTo.
type KeyGroup struct {
	UpTo int64 `json:"up_to"`
	Keys int64 `json:"keys"`
}

type options struct {
	Input
	policies         []string
	current, limiter string
	sweep, target    string
	failAbove        string
	maxBad           string
	html             string
	tolerance        time.Duration
	showKeys         bool
	number, maxKeys  int
}

// Command returns the command replay.
func Command(a *cli.App) *cobra.Command {
	o := options{}
	cmd := &cobra.Command{
		Use:   "replay FILE...",
		Short: "Show what policies would have denied of the requests in a log",
		Long: `Decides the requests of a log by one or more policies, exactly as a limiter would have decided them, and
shows how many requests and keys each policy would have denied. With --current or --limiter, it also shows
what would change from that policy to the others. No request is sent to a database.

A log is an access log of Apache or nginx (common or combined), JSON lines, or CSV with a header. It may
be compressed by gzip, and - is standard input. Requests of several files are merged by time. A line may
be up to --tolerance older than a line above it. A line that is older still is decided at the time of
the request before it. Lines that cannot be read are counted and left out. If either share is above
--max-bad, the command fails.

With --limiter, the rows of rate_limit_policy that are in force now decide: the row for a key, else the row
for its longest prefix, else the row for everybody, else the policy of --current, which is then the policy
in the code. The policies of --policy and --sweep are for keys without a row of their own. Bans that
limiters made are left out, because the requests of the log may have led to them.

Memory holds the requests of the last --tolerance, and each key with its counts. From --max-keys on, keys
that count nothing any more are forgotten, except for the busiest and those that were denied most. That
changes no decision, but a key that comes back counts as a new key. The output names keys by a code that
holds for this output only, unless --show-keys is given.`,
		Example: `  pgratelimit replay access.log --policy "sliding 100/1m"
  pgratelimit replay access.log.*.gz access.log \
      --current "fixed 100/1m" --policy "sliding 100/1m" --html report.html
  pgratelimit replay calls.jsonl --key '$.user.id' --cost '$.tokens' \
      --policy "sliding 50000/1m"
  pgratelimit replay access.log --sweep "sliding N/1m" --deny-at-most 0.1%`,
		Args: cobra.MinimumNArgs(1),
	}
	cmd.RunE = cli.Action(func(ctx context.Context, args []string) error {
		o.Files, o.Stdin = args, a.Stdin
		return o.run(ctx, a)
	})
	f := cmd.Flags()
	f.StringArrayVar(&o.policies, "policy", nil,
		"a policy to try, like "+algorithm.Examples()+`; a comma, or " + ", joins policies that all have to allow`)
	f.StringVar(&o.current, "current", "", "the policy in force, with which the others are compared")
	f.StringVar(&o.limiter, "limiter", "",
		"take what is in force from the database: the rows of this limiter in rate_limit_policy")
	f.StringVar(&o.Format, "format", "", "combined, json or csv (default: guessed)")
	f.StringArrayVar(&o.Keys, "key", nil, "field of the key, like remote_addr, user_id or $.user.id; several are "+
		"joined (default: remote_addr of an access log, key of others)")
	f.StringVar(&o.Cost, "cost", "", "field of the cost (default: cost, if CSV has it; otherwise each request costs 1)")
	f.StringVar(&o.Time, "time", "", `field of the time (default "time")`)
	f.StringVar(&o.TimeLayout, "time-layout", "", "layout of the time in Go, like '02.01.2006 15:04:05' (default: "+
		"guessed; that of access logs, RFC 3339, or seconds, milli-, micro- or nanoseconds since 1970)")
	f.DurationVar(&o.tolerance, "tolerance", 10*time.Second, "how much older a line may be than a line above it")
	f.StringVar(&o.maxBad, "max-bad", "1%",
		"the largest share of lines that cannot be read, and of lines that are older than --tolerance allows")
	f.StringVar(&o.sweep, "sweep", "", `search for the smallest limit of this policy, like "sliding N/1m"`)
	f.StringVar(&o.target, "deny-at-most", "0.1%", `what the limit of --sweep may deny, like "0.1%" or "5 keys"`)
	f.StringVar(&o.failAbove, "fail-if-denied-above", "",
		`end with exit code 3 if a policy of --policy denies more, like "0.1%"`)
	f.BoolVar(&o.showKeys, "show-keys", false, "show the keys, which may be personal data")
	f.IntVar(&o.maxKeys, "max-keys", 1_000_000, "how many keys to keep in memory; each takes about 200 bytes")
	f.IntVarP(&o.number, "number", "n", 5, "how many keys to list for each policy")
	f.StringVar(&o.html, "html", "", "also write a page with pictures to this file")
	return a.Finish(cmd)
}

func (o *options) run(ctx context.Context, a *cli.App) error {
	var err error
	failAbove := 1.0
	if o.failAbove != "" {
		if failAbove, err = ParseShare(o.failAbove); err != nil {
			return cli.Usage(fmt.Errorf("--fail-if-denied-above: %w", err))
		}
	}
	if o.MaxBad, err = ParseShare(o.maxBad); err != nil {
		return cli.Usage(fmt.Errorf("--max-bad: %w", err))
	}
	target, err := ParseTarget(o.target)
	if err != nil {
		return cli.Usage(fmt.Errorf("--deny-at-most: %w", err))
	}
	if o.number < 0 || o.tolerance < 0 || o.maxKeys < 0 {
		return cli.Usage(errors.New("--number, --tolerance and --max-keys must not be negative"))
	}
	o.Tolerance = o.tolerance.Microseconds()
	if len(o.policies) == 0 && o.current == "" && o.limiter == "" && o.sweep == "" {
		return cli.Usage(errors.New("--policy, --current, --limiter or --sweep is missing"))
	}
	if err := o.checkSweep(o.sweep); o.sweep != "" && err != nil {
		return cli.Usage(fmt.Errorf("--sweep: %w", err))
	}
	var others []Policy
	for _, text := range o.policies {
		p, err := ParsePolicy(text)
		if err != nil {
			return cli.Usage(err)
		}
		others = append(others, p)
	}
	current, table, err := o.inForce(ctx, a)
	if err != nil {
		return err
	}
	done := o.progress(a)
	defer done()

	report, err := o.replay(ctx, current, others, table)
	if err != nil {
		return err
	}
	if o.sweep != "" {
		if report.Sweep, err = o.Input.sweep(ctx, o.sweep, target, table, o.maxKeys); err != nil {
			return err
		}
	}
	done()
	if o.html != "" {
		if err := writePage(o.html, report); err != nil {
			return err
		}
	}
	if err := a.Print(report, report.text); err != nil {
		return err
	}
	for _, t := range report.Policies {
		if !t.Current && t.DeniedShare > failAbove {
			return cli.ErrDenied
		}
	}
	return nil
}

// inForce returns the policy in force for keys without a row of their own, or nil, and the rows.
func (o *options) inForce(ctx context.Context, a *cli.App) (current *Policy, t *table, err error) {
	if o.current != "" {
		p, err := ParsePolicy(o.current)
		if err != nil {
			return nil, nil, cli.Usage(err)
		}
		current = &p
	}
	if o.limiter == "" {
		return current, nil, nil
	}
	if t, err = readTable(ctx, a, o.limiter); err != nil {
		return nil, nil, err
	}
	if current = t.forEverybody(current); current == nil {
		return nil, nil, fmt.Errorf("rate_limit_policy has no policy for all keys of %s; --current gives the one "+
			"in the code", cli.Printable(o.limiter))
	}
	return current, t, nil
}

// progress shows how much of the files has been read, and returns a function that removes the bar. The size of standard
// input is not known. A sweep reads the files several times.
func (o *options) progress(a *cli.App) (done func()) {
	bar, read, total := a.NewBar("reading"), int64(0), int64(0)
	for _, name := range o.Files {
		info, err := os.Stat(name)
		if err != nil || !info.Mode().IsRegular() {
			total = -1
			break
		}
		total += info.Size()
	}
	o.Progress = func(n int64) {
		if read += n; total > 0 && read > total {
			read = n
		}
		bar.Update(read, total)
	}
	return sync.OnceFunc(bar.Remove) // it would also remove what follows the bar
}

// replay reads the log once, and decides its requests by all policies. current is nil if it is not known.
func (o *options) replay(ctx context.Context, current *Policy, others []Policy, t *table) (*Report, error) {
	all := &replayed{keys: newKeyring(), maxKeys: o.maxKeys, keep: o.number, compares: current != nil}
	if current != nil {
		all.runs = append(all.runs, newRun(*current, t))
	}
	for _, p := range others {
		all.runs = append(all.runs, newRun(p, t))
	}
	all.changes = make([]comparison, len(all.runs))
	lines, err := o.each(ctx, all.keys, all.decide)
	if err != nil {
		return nil, err
	}
	keys := all.keys
	report := &Report{
		Lines: lines, Keys: keys.count(), KeysForgotten: keys.countForgotten(), Groups: keys.groups(),
		Policies: []Totals{},
	}
	if all.requests > 0 {
		first, last := time.UnixMicro(all.from).UTC(), time.UnixMicro(all.to).UTC()
		report.From, report.To = &first, &last
		busy := int64(0)
		for _, key := range keys.busiest(int(min(max(report.Keys/100, 1), busyKeys))) {
			busy += keys.requests[key]
		}
		report.Busiest = float64(busy) / float64(all.requests)
	}
	name := o.names(keys)
	for i, r := range all.runs {
		t := r.totals(keys, name, o.number)
		if t.Current = current != nil && i == 0; current != nil && i > 0 {
			t.Change = all.changes[i].change(name, o.number)
		}
		report.Policies = append(report.Policies, t)
	}
	return report, nil
}

// names returns a function that names keys. Without --show-keys, the names are codes that cannot be guessed.
func (o *options) names(keys *keyring) func(int) string {
	if o.showKeys {
		return func(key int) string { return strings.ToValidUTF8(keys.names[key], "\ufffd") }
	}
	salt := rand.Text()
	return func(key int) string {
		sum := sha256.Sum256([]byte(salt + keys.names[key]))
		return "key-" + hex.EncodeToString(sum[:5])
	}
}

// percent formats a share. A share that is not 0 is not shown as 0.
func percent(share float64) string {
	if share > 0 && share < 0.0001 {
		return "<0.01 %"
	}
	return fmt.Sprintf("%.2f %%", 100*share)
}

func (r *Report) text(w io.Writer) {
	fmt.Fprintf(w, "%s of %s, as %s",
		cli.Count(r.Lines.Read-r.Lines.Bad, "request"), cli.Count(r.Keys, "key"), r.Lines.Format)
	if r.From != nil {
		fmt.Fprintf(w, ", from %s to %s", cli.Instant(*r.From), cli.Instant(*r.To))
	}
	fmt.Fprintf(w, "\nthe busiest 1 %% of the keys made %s of the requests\n", percent(r.Busiest))
	if r.KeysForgotten > 0 {
		fmt.Fprintf(w, "%s made room for others, and counts as a new key if it came back: --max-keys keeps more\n",
			cli.Count(r.KeysForgotten, "idle key"))
	}
	if r.Lines.Late > 0 {
		fmt.Fprintf(w, "%s later than --tolerance, decided at the time of the line before\n",
			cli.Count(r.Lines.Late, "line"))
	}
	if r.Lines.Bad > 0 {
		fmt.Fprintf(w, "%s cannot be read:\n", cli.Count(r.Lines.Bad, "line"))
		for _, bad := range r.Lines.First {
			fmt.Fprintf(w, "  %s line %d: %s\n", bad.File, bad.Line, bad.Reason)
		}
	}
	if len(r.Policies) > 0 {
		fmt.Fprintln(w, "\nPOLICY\tDENIED\tSHARE\tKEYS DENIED\tLONGEST")
		for _, t := range r.Policies {
			name := t.Policy
			if t.Current {
				name += " (current)"
			}
			longest := cli.Span(int64(t.LongestSeconds * 1e6))
			if t.NeverFits > 0 {
				longest += fmt.Sprintf(", and %d can never fit", t.NeverFits)
			}
			fmt.Fprintf(w, "%s\t%d\t%s\t%d\t%s\n", name, t.Denied, percent(t.DeniedShare), t.KeysDenied, longest)
		}
	}
	for _, t := range r.Policies {
		if t.ByRows > 0 {
			fmt.Fprintf(w, "\nbeside %s, rows for a key or a prefix decide %s\n", t.Policy,
				cli.Count(t.ByRows, "request"))
		}
		if len(t.Most) > 0 {
			fmt.Fprintf(w, "\n%s denies most:\n", t.Policy)
			fmt.Fprintln(w, "KEY\tDENIED\tREQUESTS")
			for _, d := range t.Most {
				fmt.Fprintf(w, "%s\t%d\t%d\n", cli.Short(d.Key), d.Denied, d.Requests)
			}
		}
		if c := t.Change; c != nil {
			fmt.Fprintf(w, "\nfrom the current policy to %s:\n", t.Policy)
			fmt.Fprintf(w, "%s become denied, and %d become allowed; %s better off, and %d worse\n",
				cli.Count(c.NowDenied, "request"), c.NowAllowed, cli.Count(c.KeysBetter, "key"), c.KeysWorse)
			if len(c.Most) > 0 {
				fmt.Fprintln(w, "KEY\tBECOME DENIED\tBECOME ALLOWED")
			}
			for _, k := range c.Most {
				fmt.Fprintf(w, "%s\t%d\t%d\n", cli.Short(k.Key), k.NowDenied, k.NowAllowed)
			}
		}
	}
	if s := r.Sweep; s != nil {
		if s.Limit == nil {
			fmt.Fprintf(w, "\nno limit of %s denies at most %s\n", s.Policy, s.Target)
		} else {
			fmt.Fprintf(w, "\n%s is the smallest that denies at most %s\n", s.Found, s.Target)
		}
		fmt.Fprintln(w, "LIMIT\tDENIED\tSHARE\tKEYS DENIED")
		for _, p := range s.Shown() {
			fmt.Fprintf(w, "%d\t%d\t%s\t%d\n", p.Limit, p.Denied, percent(p.DeniedShare), p.KeysDenied)
		}
	}
}
