package sql_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// readPolicies returns the numbers that the database reads from policies. The numbers are nil for policies that the
// database refuses.
func readPolicies(t testing.TB, db pgtest.Executor, texts []string) [][]algorithm.Numbers {
	t.Helper()
	rows, err := db.Query(t.Context(), `
		SELECT p.algorithms, p.limits, p.spans_us, p.refills, p.zones
		FROM unnest($1::text[]) WITH ORDINALITY AS t (policy, place), read_policy(t.policy) AS p
		ORDER BY t.place`, texts)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (numbers []algorithm.Numbers, err error) {
		var algorithms []int16
		var limits, spans, refills []int64
		var zones []*string
		err = row.Scan(&algorithms, &limits, &spans, &refills, &zones)
		for i, code := range algorithms {
			numbers = append(numbers, algorithm.Numbers{
				Algorithm: code, Limit: limits[i], Span: model.Duration(spans[i]), Refill: refills[i],
			})
			if zones[i] != nil {
				numbers[i].Zone = *zones[i]
			}
		}
		return numbers, err
	})
	require.NoError(t, err)
	require.Len(t, all, len(texts))
	return all
}

// withReadPolicy creates a function that returns NULL for a policy that is refused with a hint.
func withReadPolicy(t testing.TB, db pgtest.Executor) {
	t.Helper()
	pgtest.Exec(t, db, `
		CREATE FUNCTION read_policy(policy text,
			OUT algorithms smallint[], OUT limits bigint[], OUT spans_us bigint[], OUT refills bigint[], OUT zones text[])
		LANGUAGE plpgsql AS $$
		DECLARE "column" text; hint text; message text;
		BEGIN
			SELECT * INTO algorithms, limits, spans_us, refills, zones FROM _rate_limit_read_policy(policy);
		EXCEPTION WHEN invalid_parameter_value THEN
			GET STACKED DIAGNOSTICS "column" = COLUMN_NAME, hint = PG_EXCEPTION_HINT, message = MESSAGE_TEXT;
			ASSERT "column" = 'policy' AND hint <> '' AND message LIKE 'rate_limit: policy %', message;
			ASSERT length(policy) < 9 OR strpos(message, policy) = 0, message; -- the policy may be a key by mistake
		END $$`)
}

// readAlike counts the texts that ParsePolicy accepts, and returns the first text that the database reads differently.
func readAlike(t testing.TB, db pgtest.Executor, texts []string) (accepted int, difference string) {
	t.Helper()
	for i, got := range readPolicies(t, db, texts) {
		var want []algorithm.Numbers
		if policy, err := ratelimit.ParsePolicy(texts[i]); err == nil {
			accepted++
			for _, m := range limitertest.Model(policy).Rules {
				want = append(want, m.Numbers())
			}
		}
		if difference == "" && !slices.Equal(want, got) {
			difference = fmt.Sprintf("%.200q: Go reads %v, and SQL %v", texts[i], want, got)
		}
	}
	return accepted, difference
}

// edgesOfPolicies returns texts that are just valid or just invalid.
func edgesOfPolicies() []string {
	return slices.Concat(seedsOfPolicies(), []string{
		"fixed 1/26062d", "fixed 1/26063d", "fixed 1/1d0", "fixed 1/1d00", "fixed 1/1d+0", "fixed 1/1d+1h", "fixed 1/0d1h", "fixed 1/000001d", "fixed 1/0000000000001d",
		"fixed 1/+1h", "fixed 1/-0h", "fixed 1/+1d", "fixed 1/1_0s", "fixed +1/1s", "fixed -1/1s", "fixed ++1/1s",
		"fixed 0001/1s", "fixed " + strings.Repeat("0", 100) + "1/1s", "fixed 1/" + strings.Repeat("0", 100) + "1s",
		"fixed 1/1s" + strings.Repeat("0s", 50), "fixed 1/1." + strings.Repeat("0", 100) + "s",
		"fixed 1/1." + strings.Repeat("0", 5) + "1" + strings.Repeat("0", 100) + "s", "fixed 1/1.s", "fixed 1/.s", "fixed 1/.5s.5s",
		"fixed 1/1.0000001s", "fixed 1/1.0000000001s", "fixed 1/0.9999999999999999999999s", "fixed 1/0.00000000000000000000001h",
		"fixed 1/1500ns", "fixed 1/1000ns", "fixed 1/500ns500ns", "fixed 1/0.3us0.7us", "fixed 1/1us1ns",
		"fixed 1/0.1h0.1m", "fixed 1/1.23456789012345678901h", "fixed 1/2.9223372036854775807h", "fixed 1/2.9223372036854775808h",
		"fixed 1/2.9223372036854775809h", "fixed 1/1.9223372036854775810s", "fixed 1/0.0000333333333333333333h",
		"fixed 1/2251799813685248us", "fixed 1/2251799813685249us", "fixed 1/2251799813685248.0us", "fixed 1/2251799813685248000ns",
		"fixed 1/9223372036854775807ns", "fixed 1/9223372036854775808ns", "fixed 1/99999999999999999999999999ns",
		"fixed 2048/2251799813685248us", "fixed 2049/2251799813685248us", "fixed 4611686018427387904/1us", "fixed 4611686018427387905/1us",
		"fixed 9223372036854775807/1us", "fixed 9223372036854775808/1us", "fixed 99999999999999999999/1us",
		"bucket 1 9223372036854775807/1us", "bucket 1 9223372036854775808/1us", "bucket 4611686018427387904 2048/1us",
		"bucket 4611686018427387904 2047/1us", "bucket 1 1/2251799813685248us", "bucket 2 1/2251799813685248us", "bucket 2 2/2251799813685248us",
		"log 1000/1us", "log 1001/1us", "log 0/1us", "log 1 1/1s", "fixed 1 1/1s", "bucket 1/1s", "bucket 1 1 1/1s",
		"fixed 1/1µs", "fixed 1/1μs", "fixed 1/1Μs", "fixed 1/1µ", "fixed 1/1µm", "bµcket 1 1/1s", "bµsket 1 1/1s", "fixed 1/1~302~265s",
		`fixed 1/1\302\265s`, `fixed 1/1\\302\\265s`, "fixed 1/1!302!265s", "fixed~302~2401/1s", `fixed\302\2401/1s`, "fixed 1/1ſ", "fixed 1/1K",
		"fixed １/1s", "fixed 1/1ｓ", "FIXED 1/1s", "fixed 1/1S", "fixed 1/1H", "fixed 1 /1s", "fixed 1/ 1s", "fixed 1/1s x", "fixed1/1s",
		"fixed 1/1s/1s", "fixed 1//1s", "fixed 1/1h/", "fixed 1/d1h", "fixed 1/1dd", "fixed 1/1h1d", "fixed 1/1d1d", "fixed 1/1 d",
		",", "fixed 1/1s,", ",fixed 1/1s", "fixed 1/1s,,fixed 1/1s", "fixed 1/1s, log 1/1s", "fixed 1/1s ,bucket 1 1/1s\n,sliding 1/1s",
		strings.TrimSuffix(strings.Repeat("fixed 1/1s,", 8), ","), strings.TrimSuffix(strings.Repeat("fixed 1/1s,", 9), ","), "%", "%s", "'", `"`,
		"every 1/Day", "every 1/days", "every 1/1d", "every 1/", "every /day", "every 0/day", "every -1/day", "every +1/day",
		"every 4611686018427387904/day", "every 4611686018427387905/day", "every 1 1/day", "every 1/day UTC", "every 1/day utc",
		"every 1/day Europe/Berlin", "every\t1/week\u2003Europe/Berlin ", "every 1/day Europe/Berlin UTC", "every 1/day Europe /Berlin",
		"every 1/day Europe/", "every 1/day /Berlin", "every 1/day Europe//Berlin", "every 1/day europe/Berlin", "every 1/day Europe/berlin",
		"every 1/day CET", "every 1/day EST5EDT", "every 1/day <+03>-3", "every 1/day +03", "every 1/day Etc/GMT+3", "every 1/day Berlin",
		"every 1/day Europe/Berlin3", "every 1/day 3Europe/Berlin", "every 1/day America/Port-au-Prince", "every 1/day A/B", "every 1/day America/Argentina/San_Juan",
		"every 1/day Mars/Phobos", "every 1/day Europe/Bérlin", "every 1/day Europe/Berlin~", "every 1/day Europe/Berlin'",
		"every 1/day Europe/" + strings.Repeat("B", 57), "every 1/day Europe/" + strings.Repeat("B", 58),
		"every 1/day Europe/Berlin,every 2/month,fixed 1/1s", "fixed 1/1s UTC", "bucket 1 1/1s UTC", "fixed 1/day", "log 1/month",
		"fixed\u202f1/1s", "fixed\u20571/1s", "fixed\u205f1/1s",
	})
}

// spacesInPolicies returns texts that have white space, or similar characters, between and around words. It takes each
// of the first characters, and of the others those that are like white space or beside it.
func spacesInPolicies(first rune) (texts []string) {
	for r := rune(1); r < 0x3100; r++ {
		if r < first || unicode.IsSpace(r-1) || unicode.IsSpace(r+1) || unicode.In(r, unicode.Z, unicode.Cc, unicode.Cf) {
			texts = append(texts, "fixed"+string(r)+"1/1s", string(r)+"fixed 1/1s"+string(r))
		}
	}
	return texts
}

// seedsOfPolicies returns the texts that the tests of ParsePolicy use.
func seedsOfPolicies() []string {
	var texts []string
	for text := range limitertest.PolicyTexts() {
		texts = append(texts, text)
	}
	for text := range limitertest.OtherPolicyTexts() {
		texts = append(texts, text)
	}
	for text := range limitertest.UnreadablePolicyTexts() {
		texts = append(texts, text)
	}
	for text := range limitertest.ImpossiblePolicyTexts() {
		texts = append(texts, text)
	}
	slices.Sort(texts)
	return append(texts, limitertest.FuzzedPolicyTexts()...)
}

// The database accepts the same texts as ParsePolicy, and reads the same numbers.
func TestSQLReadsPoliciesAsGoDoes(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	withReadPolicy(t, db.Pool)
	texts := append(edgesOfPolicies(), spacesInPolicies(0x100)...)
	r := rand.New(rand.NewPCG(limitertest.Seed(t), 0))
	seeds := seedsOfPolicies()
	many := 500 * limitertest.Rounds(t)
	for range many {
		policy := limitertest.RandomPolicy(r)
		if r.IntN(4) == 0 {
			policy = ratelimit.All(policy, limitertest.RandomPolicy(r), limitertest.RandomPolicy(r))
		}
		texts = append(texts, policy.String(), mutatePolicy(r, seeds[r.IntN(len(seeds))]), randomSpan(r))
	}
	accepted, difference := readAlike(t, db.Pool, texts)
	require.Empty(t, difference)
	require.Greater(t, accepted, many)
	require.Less(t, accepted, len(texts)-many)
}

// TestSQLReadsPoliciesAsGoDoes tries only some of these characters.
func TestThoroughSpacesInPolicies(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	withReadPolicy(t, db.Pool)
	accepted, difference := readAlike(t, db.Pool, spacesInPolicies(0x3100))
	require.Empty(t, difference)
	require.Greater(t, accepted, 20)
}

// edgesOfPolicies reveals each of these mistakes.
func TestMistakesInTheReaderOfPoliciesAreSeen(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	withReadPolicy(t, db.Pool)
	definitions := pgtest.Scalar[[]string](t, db.Pool, `SELECT array_agg(pg_get_functiondef(oid)) FROM pg_proc
		WHERE proname LIKE '_rate_limit_valid_%' OR proname = '_rate_limit_read_policy'`)
	texts := edgesOfPolicies()
	for right, wrong := range map[string]string{
		"'~!'":                              "'~'",
		"'(~302~265|~316~274)s'":            "'(~302~265)s'",
		"5[017]":                            "5[01]",
		"[+]?0*[0-9]{1,19}":                 "[+]?[0-9]{1,19}",
		"'^[+]?('":                          "'^('",
		"'^(0|('":                           "'^(('",
		"{1,6})d":                           "{1,4})d",
		"86400000000000":                    "86400000000001",
		"<= biggest AND coalesce":           "< biggest AND coalesce",
		"> biggest + 1":                     "> biggest * 100",
		"unit::double precision / scale)":   "unit::double precision) / scale",
		"span % 1000 = 0":                   "span % 1 = 0",
		"capacity <= 4611686018427387904 /": "capacity < 4611686018427387904 /",
		"max_count BETWEEN 1 AND 1000":      "max_count BETWEEN 1 AND 1001",
		"max_count BETWEEN 1 AND 4611":      "max_count BETWEEN 0 AND 4611",
		"octet_length(zone) <= 64":          "octet_length(zone) <= 65",
		"(/[A-Z][A-Za-z_-]*)+)$'":           "(/[A-Z][A-Za-z_-]*)*)$'",
		"~ '^(UTC|":                         "~ '(UTC|",
		"coalesce(words[5], 'UTC')":         "coalesce(words[5], 'Etc/UTC')",
		"WHEN 'week' THEN '7d'":             "WHEN 'week' THEN '8d'",
		"AND words[5] IS NULL":              "",
		"cardinality(algorithms) > 8":       "cardinality(algorithms) > 9",
	} {
		i := slices.IndexFunc(definitions, func(text string) bool { return strings.Contains(text, right) })
		require.GreaterOrEqual(t, i, 0, right)
		pgtest.Exec(t, db.Pool, strings.ReplaceAll(definitions[i], right, wrong))
		_, difference := readAlike(t, db.Pool, texts)
		require.NotEmpty(t, difference, right)
		pgtest.Exec(t, db.Pool, definitions[i])
	}
	_, difference := readAlike(t, db.Pool, texts)
	require.Empty(t, difference)
}

// mutatePolicy changes one or two characters of a text.
func mutatePolicy(r *rand.Rand, text string) string {
	runes := []rune(text)
	const alphabet = "0123456789 dhmsnuµμ./+-,fixedlogbucktverywnUTCB_\t\\~!"
	characters := []rune(alphabet)
	for range 1 + r.IntN(2) {
		at := r.IntN(len(runes) + 1)
		switch {
		case r.IntN(2) == 0 || at == len(runes):
			runes = slices.Insert(runes, at, characters[r.IntN(len(characters))])
		case r.IntN(2) == 0:
			runes = slices.Delete(runes, at, at+1)
		default:
			runes[at] = characters[r.IntN(len(characters))]
		}
	}
	return string(runes)
}

// randomSpan returns a policy whose duration has random terms.
func randomSpan(r *rand.Rand) string {
	text := "sliding 1/"
	for range 1 + r.IntN(3) {
		digits := fmt.Sprintf("%020d%020d", r.Uint64(), r.Uint64())
		text += digits[len(digits)-1-r.IntN(5):]
		if r.IntN(2) == 0 {
			text += "." + strings.TrimRight(digits[:r.IntN(25)], "0")
		}
		text += []string{"ns", "us", "µs", "ms", "s", "m", "h"}[r.IntN(7)]
	}
	return text
}

// textsIn returns those texts whose characters all exist in an encoding. A database with this encoding cannot receive
// other texts.
func textsIn(encoding string) []string {
	highest := map[string]rune{"UTF8": utf8.MaxRune, "SQL_ASCII": utf8.MaxRune, "LATIN1": 0xff, "EUC_JP": 0x7f}[encoding]
	return slices.DeleteFunc(append(edgesOfPolicies(), spacesInPolicies(0x100)[:0x200]...), func(text string) bool {
		return strings.ContainsFunc(text, func(r rune) bool { return r > highest })
	})
}

// FuzzDatabasePolicies compares _rate_limit_read_policy with ParsePolicy.
func FuzzDatabasePolicies(f *testing.F) {
	pgtest.NotThroughProxy(f, "what a migrated database has")
	for _, text := range seedsOfPolicies() {
		f.Add(text)
	}
	db := pgtest.New(f)
	withReadPolicy(f, db.Pool)
	f.Fuzz(func(t *testing.T, text string) {
		if utf8.ValidString(text) && !strings.ContainsRune(text, 0) { // the database cannot receive other texts
			_, difference := readAlike(t, db.Pool, []string{text})
			require.Empty(t, difference)
		}
	})
}
