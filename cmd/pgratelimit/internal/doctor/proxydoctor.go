package doctor

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
	"github.com/pgratelimit/ratelimit/internal/shards"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/shard"
)

var (
	//go:embed sql/examined.sql
	examinedSQL string
	//go:embed sql/proxy_functions.sql
	proxyFunctionsSQL string
	//go:embed sql/recorded.sql
	recordedSQL string
)

// proxyExamination has the data that the checks of a proxy share.
type proxyExamination struct {
	*Examination

	proxy     shard.ProxyState
	states    []*shard.State
	functions []proxyFunction
	owner     string // the owner of the functions
}

// examineAll checks this database. If this database is a proxy, examineAll also checks each shard.
func examineAll(ctx context.Context, db cli.DB) ([]cli.Finding, error) {
	e := &proxyExamination{Examination: &Examination{DB: db}}
	locks, closed, err := e.checkLocks(ctx)
	if err != nil || closed {
		return []cli.Finding{locks}, err
	}
	if e.proxy, e.states, err = shard.States(ctx, db); err != nil {
		return nil, err
	}
	if e.states == nil {
		return examineNoProxy(ctx, db)
	}
	if err := e.ReadServer(ctx); err != nil {
		return nil, err
	}
	findings, err := run(ctx, []check{
		{"server", true, e.CheckServer},
		{"connection", true, e.checkConnection},
		{"PL/Proxy", true, e.checkPLProxy},
		{"map", true, e.checkMap},
		{"functions", true, e.checkFunctions},
		{"rights", true, e.checkProxyRights},
	})
	if err != nil {
		return nil, err
	}
	for _, s := range e.states {
		of, err := e.examineShard(ctx, s)
		if err != nil {
			return nil, err
		}
		findings = append(findings, of...)
	}
	return findings, nil
}

// examineNoProxy checks a database that is not a proxy. A former or future proxy must not get tables.
func examineNoProxy(ctx context.Context, db cli.DB) ([]cli.Finding, error) {
	findings, err := examine(ctx, db)
	if err != nil {
		return nil, err
	}
	at := *db.App // ReadTarget sets the schema in its argument
	target, err := shard.ReadTarget(ctx, cli.DB{App: &at, Pool: db.Pool})
	if err != nil || len(target.Tables) > 0 {
		return findings, nil //nolint:nilerr // the error is one of the findings
	}
	for i := range findings {
		f := &findings[i]
		switch {
		case f.Check != "migrations" || f.Level != cli.Problem:
		case len(target.Connections) > 0:
			f.Found = "this is a proxy of shards, and its functions are missing"
			f.Do = "run `pgratelimit shard set` with the connection strings that it has: '" +
				cli.Printable(strings.Join(target.Connections, "', '")) + "'; migrate only the shards"
		case target.Available:
			f.Do += "; but if this is to be a proxy of shards, do not migrate it: 'pgratelimit shard set' makes it one"
		}
	}
	return findings, nil
}

// examineShard runs the checks of a shard.
func (e *proxyExamination) examineShard(ctx context.Context, s *shard.State) ([]cli.Finding, error) {
	findings := slices.Clone(s.Wrong)
	if len(findings) == 0 {
		findings = append(findings, cli.OK("%v, at version %d, with a clock %+d ms from the proxy's",
			s.Is, s.Version, s.Ahead()).Of("place"))
	}
	if s.Still != "" {
		findings[0].Found = "still with " + s.Still
	}
	if s.Reached {
		f, err := e.checkThrough(ctx, s.Place)
		if err != nil {
			return nil, err
		}
		findings = append(findings, f.Of("through the proxy"))
	}
	if s.Reached && s.Still == "" {
		if err := s.Store.WithPool(ctx, func(db cli.DB) error {
			more, err := examine(ctx, db)
			for _, f := range more {
				if f.Check != "connection" { // PL/Proxy uses other connections
					findings = append(findings, f)
				}
			}
			return err
		}); err != nil {
			return nil, s.Store.About(err)
		}
	}
	for i := range findings {
		f := &findings[i]
		f.Check = s.Name + ": " + f.Check
		if f.Do != "" {
			f.Do = "on " + s.Name + ": " + f.Do
		}
	}
	return findings, nil
}

func (e *proxyExamination) checkPLProxy(ctx context.Context) (cli.Finding, error) {
	var version, encoding, statements string
	var major int
	var usage, mapped bool
	if err := e.row(ctx, examinedSQL, &version, &major, &encoding, &e.owner, &usage, &mapped, &statements); err != nil {
		return cli.Finding{}, err
	}
	owner := pgx.Identifier{e.owner}.Sanitize()
	switch {
	case version == "":
		return cli.Problem.Finding(fmt.Sprintf("install it (Debian: postgresql-%d-plproxy), and run "+
			"`pgratelimit shard set` as a superuser", major), "the database has no extension plproxy"), nil
	case encoding != "UTF8":
		return cli.Problem.Finding("make the proxy in a database with the encoding UTF8",
			"the database has the encoding %s, in which keys have other bytes", encoding), nil
	case !usage:
		return cli.Problem.Finding(fmt.Sprintf("`GRANT USAGE ON FOREIGN SERVER %s TO %s`", shards.Server, owner),
			"the functions run with the rights of %s, and that role may not use the foreign server",
			cli.Printable(e.owner)), nil
	case !mapped:
		return cli.Problem.Finding("run `pgratelimit shard set` with --user",
			"PL/Proxy has no role with which to connect for %s, the functions' owner", cli.Printable(e.owner)), nil
	}
	return e.checkRecorded(ctx, statements, cli.OK("version %s, with a role for its connections", version))
}

// checkRecorded looks for the shards' password in pg_stat_statements. If it finds no password, checkRecorded returns
// the finding in the argument otherwise.
func (e *proxyExamination) checkRecorded(
	ctx context.Context, schema string, otherwise cli.Finding,
) (cli.Finding, error) {
	if schema == "" {
		return otherwise, nil
	}
	sql := fmt.Sprintf(recordedSQL, schema)
	var recorded int
	err := e.row(ctx, sql, &recorded)
	if _, refused := errors.AsType[*pgconn.PgError](err); refused || err == nil && recorded == 0 {
		return otherwise, nil // the extension is not loaded, or this role may not read it
	}
	_, condition, _ := strings.Cut(strings.TrimSpace(sql), "WHERE ")
	return cli.Problem.Finding(fmt.Sprintf(
		"give the role on the shards another password, and run `pgratelimit shard set` "+
			"with that; then, as a superuser, `SELECT %[1]s.pg_stat_statements_reset(userid, dbid, queryid) "+
			"FROM %[1]s.pg_stat_statements WHERE %[2]s`", schema, condition),
		"pg_stat_statements has a password of the shards in %s: members of pg_read_all_stats can read it, such as "+
			"rate_limit_reader", cli.Count(recorded, "text")), err
}

func (e *proxyExamination) checkMap(context.Context) (cli.Finding, error) {
	n := len(e.states)
	switch {
	case n == 0 || n&(n-1) != 0:
		return cli.Problem.Finding("mend the options of foreign server "+shards.Server,
			"there are %d connection strings, and PL/Proxy needs a power of two", n), nil
	case e.proxy.Shards != n:
		return cli.Problem.Finding("run `pgratelimit shard set`", "the functions know %s, and the foreign server has "+
			"%s", cli.Count(e.proxy.Shards, "shard"), cli.Count(n, "connection string")), nil
	}
	return cli.OK("%s", cli.Count(n, "shard")), nil
}

// proxyFunction is a row of proxyFunctionsSQL: a function of a proxy.
type proxyFunction struct {
	Name       string
	Kind       string // the language, and "security definer" if the function has its owner's rights
	Body       string
	Signature  string
	Arguments  string // the arguments with their names
	Executable bool   // whether this role may execute the function
	Public     bool   // whether every role may execute the function
	Usable     bool   // whether a role that can log in may execute the function
}

// checkFunctions compares the functions with those that 'shard set' would create now.
func (e *proxyExamination) checkFunctions(ctx context.Context) (_ cli.Finding, err error) {
	if e.functions, err = lookAt[proxyFunction](ctx, e.Examination, proxyFunctionsSQL); err != nil {
		return cli.Finding{}, err
	}
	like := slices.IndexFunc(e.states, func(s *shard.State) bool { return s.Reached && s.Version == e.proxy.Version })
	if like < 0 {
		return cli.Warning.Finding("mend the shards first", "could not be compared, because no shard of version %d "+
			"answers", e.proxy.Version), nil
	}
	source, err := shard.ReadSource(ctx, e.states[like].Store)
	if err != nil {
		return cli.Finding{}, err
	}
	text, err := source.Proxy(e.Schema, e.owner, e.proxy.Shards)
	if err != nil {
		return cli.Finding{}, err
	}
	made := functionsIn(text)
	for _, f := range source.Functions {
		entry := made[f.Name]
		entry.Arguments = f.Arguments
		made[f.Name] = entry
	}
	return judgeFunctions(made, e.functions), nil
}

var (
	functionName     = regexp.MustCompile(`^.*?\.(\w+)\(`)
	functionLanguage = regexp.MustCompile(`LANGUAGE (\w+)`)
)

// functionsIn returns, by name, the functions that an SQL script creates.
func functionsIn(text string) map[string]proxyFunction {
	all := map[string]proxyFunction{}
	for _, part := range strings.Split(text, "\nCREATE OR REPLACE FUNCTION ")[1:] {
		name := functionName.FindStringSubmatch(part)[1]
		head, rest, _ := strings.Cut(part, "$$")
		body, _, _ := strings.Cut(rest, "$$")
		f := proxyFunction{Name: name, Body: body, Kind: functionLanguage.FindStringSubmatch(head)[1]}
		if strings.Contains(head, "\nSECURITY DEFINER") {
			f.Kind += " security definer"
		}
		all[name] = f
	}
	return all
}

func judgeFunctions(made map[string]proxyFunction, found []proxyFunction) cli.Finding {
	var wrong, drop []string
	seen := map[string]bool{}
	for _, f := range found {
		want, expected := made[f.Name]
		switch {
		case !expected || want.Arguments != "" && f.Arguments != want.Arguments:
			wrong = append(wrong, f.Signature+" should not be there")
			drop = append(drop, "`DROP FUNCTION "+f.Signature+"`")
			continue
		case f.Kind != want.Kind:
			wrong = append(wrong, fmt.Sprintf("%s is %s instead of %s", f.Name, f.Kind, want.Kind))
		case f.Body != want.Body:
			wrong = append(wrong, f.Name+" has another body")
		}
		seen[f.Name] = true
	}
	for name := range made {
		if !seen[name] {
			wrong = append(wrong, name+" is missing")
		}
	}
	if len(wrong) == 0 {
		return cli.OK("the %d that this release makes", len(found))
	}
	slices.Sort(wrong)
	return cli.Problem.Finding(strings.Join(append(drop,
		"run `pgratelimit shard set` with the same connection strings"),
		", then "), "not what this release makes: %s", strings.Join(wrong, "; "))
}

// checkProxyRights checks the rights on the functions that checkFunctions has read.
func (e *proxyExamination) checkProxyRights(context.Context) (cli.Finding, error) {
	var public, missing, nobodys []string
	for _, f := range e.functions {
		if f.Public && f.Name != "rate_limit_version" && f.Name != "rate_limit_shards" {
			public = append(public, f.Signature)
		}
		if slices.Contains(algorithm.Functions(), f.Name) {
			if !f.Usable {
				nobodys = append(nobodys, f.Signature)
			}
			if !f.Executable {
				missing = append(missing, f.Signature)
			}
		}
	}
	grant := func(of []string, to string) string {
		return fmt.Sprintf("run deploy/roles.sql there and `pgratelimit shard set`, which lets rate_limit_app execute "+
			"them; or `GRANT EXECUTE ON FUNCTION %s TO %s`", strings.Join(of, ", "), to)
	}
	switch {
	case len(public) > 0:
		return cli.Warning.Finding(fmt.Sprintf(
			"`REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC`, and grant it to the roles "+
				"that need it", strings.Join(public, ", ")),
			"every role may execute %s", strings.Join(public, ", ")), nil
	case len(nobodys) > 0:
		return cli.Problem.Finding(grant(nobodys, "the application's role"),
			"only their owner may execute %s, and cannot log in", strings.Join(nobodys, ", ")), nil
	case len(missing) > 0:
		return cli.OK("this role may not execute %s, and others may", strings.Join(missing, ", ")), nil
	}
	return cli.OK("this role may execute the functions, and not everybody may"), nil
}

// checkThrough queries a shard through the proxy, as an application does.
func (e *proxyExamination) checkThrough(ctx context.Context, place int) (cli.Finding, error) {
	n := len(e.states)
	if e.proxy.Shards != n || n&(n-1) != 0 || !slices.ContainsFunc(e.functions, func(f proxyFunction) bool {
		return f.Name == "rate_limit_peek" && f.Executable
	}) {
		return cli.OK("not tried, because the map is wrong, or this role may not call rate_limit_peek"), nil
	}
	key := ""
	for i := 0; key == "" || shardkey.Of(key, n) != place; i++ {
		key = fmt.Sprintf("doctor %d", i)
	}
	err := e.Read(ctx, func(tx cli.Tx) error {
		_, err := tx.Exec(ctx, "SELECT * FROM rate_limit_peek('pgratelimit doctor', $1, 'fixed 1/1m')", key)
		return err
	})
	if err == nil {
		return cli.OK("it answers"), nil
	}
	if ctx.Err() != nil {
		return cli.Finding{}, err
	}
	found, do := shard.ProxyTrouble(err)
	return cli.Problem.Finding(do, "%s", found), nil
}
