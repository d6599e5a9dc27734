package doctor

import (
	"context"
	_ "embed"
	"fmt"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

var (
	//go:embed sql/tables.sql
	tablesSQL string
	//go:embed sql/sample.sql
	sampleSQL string
	//go:embed sql/stuck.sql
	stuckSQL string
)

// TableHealth is a row of tablesSQL, with the results of a sample.
type TableHealth struct {
	Name              string
	Persistence       string
	Bytes, ToastBytes int64
	Fillfactor        int64
	Live, Dead        int64
	Updated, Hot      int64
	Vacuumed          *time.Time
	Now               time.Time
	XidAge            int64
	Autovacuum        bool
	OtherIndexes      []string

	sql     string  // the table's name with the schema
	sweep   string  // the command line for a sweep
	sampled float64 // the share of the table that was read
	sample  sampledRows
}

// sampledRows is a row of sampleSQL.
type sampledRows struct {
	Table         string
	All, Live     int64
	Filled, Toast int64 // bytes
}

// checkTables returns several findings for each table.
func (e *Examination) checkTables(ctx context.Context) ([]cli.Finding, error) {
	tables, err := lookAt[TableHealth](ctx, e, tablesSQL)
	if err != nil {
		return nil, err
	}
	unread, sampled := cli.OK("not looked at, because this role may not read the tables"), false
	if e.Server.Readable && !e.Server.Standby {
		err := e.sample(ctx, tables)
		if err := could(err, &unread); err != nil {
			return nil, err
		}
		sampled = err == nil
	}
	var findings []cli.Finding
	for _, t := range tables {
		t.sql, t.sweep = e.Server.name(t.Name), e.Command("sweep")
		add := func(check string, f cli.Finding) { findings = append(findings, f.Of(t.Name+": "+check)) }
		add("kind", t.judgeKind())
		if e.Server.Standby { // a standby has no statistics, and cannot read rate_limit_ephemeral
			continue
		}
		add("HOT updates", t.JudgeHOT())
		add("dead tuples", t.JudgeDead())
		add("autovacuum", t.JudgeVacuum())
		add("transaction ids", t.JudgeAge(e.Server.FreezeMaxAge))
		bloat, sweeping := unread, unread
		if sampled {
			bloat, sweeping = t.judgeBloat(), t.judgeSweeping()
		}
		add("bloat", bloat)
		add("sweeping", sweeping)
	}
	if e.Server.Standby {
		return findings, nil
	}
	slots := unread
	if sampled {
		slots, err = e.checkSlots(ctx, tables)
		if err := could(err, &slots); err != nil {
			return nil, err
		}
	}
	return append(findings, slots.Of("slots")), nil
}

// percent returns the percentage of a table that a sample reads.
func percent(tables []TableHealth, name string) float64 {
	for _, t := range tables {
		if t.Name == name {
			return 100 * t.sampled
		}
	}
	return 100
}

// StuckSlots is a row of stuckSQL.
type StuckSlots struct {
	Limiter       string
	Keys, Waiting int64
	FirstAfter    int64 // in seconds
}

// checkSlots looks for keys of which nobody can get a slot for long, unless a holder releases its own.
func (e *Examination) checkSlots(ctx context.Context, tables []TableHealth) (cli.Finding, error) {
	stuck, err := lookAt[StuckSlots](ctx, e, stuckSQL, LongTime.Microseconds(),
		percent(tables, cli.Table(false)+"_hold"), percent(tables, cli.Table(true)+"_hold"))
	return JudgeSlots(stuck), err
}

// JudgeSlots warns of slots whose holders may have died. The tables do not have the TTL of a slot or the time of its
// last renewal, so a holder that renews a slot with a TTL of more than LongTime looks the same.
func JudgeSlots(stuck []StuckSlots) cli.Finding {
	if len(stuck) == 0 {
		return cli.OK("no key is full of slots that last for another %v or more, and are past half of their time",
			LongTime)
	}
	var found []string
	for _, s := range stuck {
		found = append(found, fmt.Sprintf("limiter %s has %s, where %d wait, and the first slot ends in %v",
			cli.Printable(s.Limiter), cli.Count(s.Keys, "full key"), s.Waiting,
			time.Duration(s.FirstAfter)*time.Second))
	}
	return cli.Warning.Finding("'pgratelimit slots NAME' lists the holders, and 'pgratelimit slots release SLOT' "+
		"takes the slot of a dead holder away; so that slots of dead holders end soon, acquire them with a short TTL, "+
		"such as 30 s, and renew them",
		"%s, unless somebody releases one; the slots are past half of their time, so perhaps nobody renews them: the "+
			"tables do not tell whether their holders live", strings.Join(found, "; ")).ForAnybody()
}

func (e *Examination) sample(ctx context.Context, tables []TableHealth) error {
	for i := range tables {
		tables[i].sampled = cli.SampleShare(tables[i].Bytes)
	}
	all, err := lookAt[sampledRows](ctx, e, sampleSQL,
		percent(tables, cli.Table(false)), percent(tables, cli.Table(true)),
		percent(tables, cli.Table(false)+"_hold"), percent(tables, cli.Table(true)+"_hold"))
	for _, of := range all {
		for i := range tables {
			if tables[i].Name == of.Table {
				tables[i].sample = of
			}
		}
	}
	return err
}

// ofHolds tells whether the table has holds.
func (t TableHealth) ofHolds() bool { return strings.HasSuffix(t.Name, "_hold") }

func (t TableHealth) judgeKind() cli.Finding {
	want, kinds := "u", map[string]string{"u": "unlogged", "p": "logged", "t": "temporary"}
	if strings.HasPrefix(t.Name, cli.Table(true)) {
		want = "p"
	}
	own, others := "its primary key", "no index but the primary key"
	if t.ofHolds() {
		own, others = "those of the migrations", "no other index than those of the migrations"
	}
	switch {
	case t.Persistence != want:
		return cli.Warning.Finding(fmt.Sprintf("`ALTER TABLE %s SET %s`", t.sql, strings.ToUpper(kinds[want])),
			"it is %s, and the migrations made it %s", kinds[t.Persistence], kinds[want])
	case len(t.OtherIndexes) > 0:
		drop := "`DROP INDEX CONCURRENTLY " // each index needs a statement of its own
		return cli.Warning.Finding(drop+strings.Join(t.OtherIndexes, "`, "+drop)+"`",
			"it has an index besides %s, so updates that change the index's columns are not HOT, and the table bloats",
			own)
	case t.Fillfactor != fillfactor && !t.ofHolds():
		return cli.Warning.Finding(fmt.Sprintf("`ALTER TABLE %s SET (fillfactor = %d)`", t.sql, fillfactor),
			"its fillfactor is %d, so fewer updates find room on their page than with %d", t.Fillfactor, fillfactor)
	}
	return cli.OK("%s, with %s", kinds[want], others)
}

func (t TableHealth) JudgeHOT() cli.Finding {
	if t.Updated < fewUpdates {
		return cli.OK("%s so far, too few to tell", cli.Count(t.Updated, "update"))
	}
	share := float64(t.Hot) / float64(t.Updated)
	if t.ofHolds() {
		return cli.OK("%.1f %% of %d updates; renewals and ends change an index, so they are not HOT",
			100*share, t.Updated)
	}
	if share < leastHOT {
		return cli.Warning.Finding("mend what else is found here, and long transactions, which keep dead tuples on "+
			"the pages; then, as a superuser, `VACUUM "+t.sql+"`, and to count anew "+
			"`SELECT pg_stat_reset_single_table_counters('"+
			strings.ReplaceAll(t.sql, "'", "''")+"'::regclass)`",
			"%.1f %% of %d updates were HOT; the others write the index too", 100*share, t.Updated).ForAnybody()
	}
	return cli.OK("%.1f %% of %d updates", 100*share, t.Updated)
}

func (t TableHealth) JudgeDead() cli.Finding {
	if t.Dead > FewDead && t.Dead > t.Live {
		return cli.Warning.Finding(
			"`VACUUM "+t.sql+"`, and find out what keeps autovacuum away, such as long transactions",
			"%d dead and %d live", t.Dead, t.Live)
	}
	return cli.OK("%d dead and %d live", t.Dead, t.Live)
}

func (t TableHealth) JudgeVacuum() cli.Finding {
	last, late := "never", true
	if t.Vacuumed != nil {
		age := t.Now.Sub(*t.Vacuumed)
		last, late = fmt.Sprintf("%s, %v before now", cli.Instant(*t.Vacuumed), age.Round(time.Second)),
			age > LateVacuum
	}
	switch {
	case !t.Autovacuum:
		return cli.Problem.Finding(fmt.Sprintf("`ALTER TABLE %s RESET (autovacuum_enabled)`", t.sql),
			"it is turned off for this table; last visit: %s", last)
	case late && t.Dead > FewDead:
		return cli.Warning.Finding("`VACUUM "+t.sql+"`, and see whether autovacuum is busy elsewhere: "+
			"pg_stat_progress_vacuum, autovacuum_max_workers",
			"last visit: %s, and there are %d dead tuples", last, t.Dead)
	}
	return cli.OK("last visit: %s", last)
}

func (t TableHealth) JudgeAge(freezeMaxAge int64) cli.Finding {
	how, text := howOld(t.XidAge, freezeMaxAge)
	f := how.Finding("let VACUUM finish: end long transactions and prepared ones, "+
		"drop abandoned replication slots, then `VACUUM FREEZE "+t.sql+"`", "%s", text)
	if how == cli.Fine {
		f.Do = ""
	}
	return f
}

// judgeBloat compares the table's size with the size that its rows would need in a new table. The sample gives an
// estimate of the number of rows. The pages of a healthy table are only filled up to the fillfactor.
func (t TableHealth) judgeBloat() cli.Finding {
	bytes := t.Bytes + t.ToastBytes
	if bytes < smallTable {
		return cli.OK("%s, too small to matter", cli.Size(bytes))
	}
	const pageHeader = 24
	needed := float64(t.sample.Filled)*100/float64(t.Fillfactor)*cli.BlockSize/(cli.BlockSize-pageHeader) +
		float64(t.sample.Toast)
	room := t.sampled * float64(bytes)
	share := 100 * min(needed/room, 1)
	if room > mostRoom*needed {
		return cli.Warning.Finding(fmt.Sprintf(
			"`VACUUM FULL %s` gives the rest back, and locks the table meanwhile, so that calls fail; "+
				"pg_repack does not lock it; without either, new rows use the room after a VACUUM", t.sql),
			"%s, of which its rows need %.0f %%", cli.Size(bytes), share)
	}
	return cli.OK("%s, of which its rows need %.0f %%", cli.Size(bytes), share)
}

func (t TableHealth) judgeSweeping() cli.Finding {
	if t.sample.All == 0 {
		return cli.OK("no rows")
	}
	expired := float64(t.sample.All-t.sample.Live) / float64(t.sample.All)
	f := cli.OK("%.0f %% of the rows have expired", 100*expired)
	if t.Bytes >= smallTable && expired > mostExpired {
		f.Level, f.Do, f.Anybody = cli.Warning, t.sweep+", best from cron, see deploy/", true
	}
	return f
}
