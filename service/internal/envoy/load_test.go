package envoy_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/service/internal/envoy"
)

func TestLoadReadsTheFilesOfTheReference(t *testing.T) {
	t.Parallel()
	config := load(t, filesIn(t, "configs"))
	require.Equal(t, []string{"files", "modes", "replaced", "shop", "units"}, config.Domains())
}

// The reference refuses these files. The errors say where they are wrong, and what to do.
func TestLoadRefusesWhatTheReferenceRefuses(t *testing.T) {
	t.Parallel()
	want := map[string]string{
		"1.yaml": `1.yaml:4: there is no unit "fortnight"; write second, minute, hour, day, week, month or year`,
		"2.yaml": `2.yaml:3: the descriptor has no key; write the key of Envoy's descriptor entry`,
		"3.yaml": `3.yaml:1: there is no domain; write the domain that Envoy sends, such as: domain: shop`,
		"4.yaml": `4.yaml:4: the descriptor "a" is already in line 3; join the two`,
		"5.yaml": `5.yaml:4: an unlimited rate_limit has no unit; remove unit or unlimited`,
		"6.yaml": `6.yaml:4: share_threshold needs a wildcard: a * in the value, such as /files/*; remove one or add the other`,
		"7.yaml": `7.yaml:4: a descriptor has no field "rate_limits"; its fields are key, value, rate_limit, descriptors, ` +
			`shadow_mode, quota_mode, detailed_metric, value_to_metric, share_threshold, metadata`,
		"8.yaml": `8.yaml:4: requests_per_unit has to be a whole number from 0 to 4294967295`,
	}
	files := filesIn(t, "bad")
	require.Len(t, files, len(want))
	for name, content := range files {
		_, err := envoy.Load(map[string][]byte{name: content})
		require.EqualError(t, err, want[name])
	}
	_, err := envoy.Load(files)
	require.Equal(t, len(want), strings.Count(err.Error(), "\n")+1, "one error for each file: %v", err)
}

func TestLoadRefuses(t *testing.T) {
	t.Parallel()
	const begin = "domain: x\ndescriptors:\n"
	for _, test := range []struct{ content, want string }{
		{"", "f: is empty; a file needs a domain and descriptors"},
		{"# nothing\n", "f: is empty; a file needs a domain and descriptors"},
		{"domain: [", "f:1: is not YAML: did not find expected node content"},
		{"- a", "f:1: a file has to be a mapping: lines of the form name: value"},
		{"domain:\n", "f:1: there is no domain; write the domain that Envoy sends, such as: domain: shop"},
		{"domain: [a]", "f:1: has to be text, not a list or a mapping"},
		{`domain: "a\0"`, "f:1: the domain has a NUL character, which Postgres cannot store"},
		{"domain: " + strings.Repeat("x", 123), "f:1: the domain has 123 bytes; it may have 122"},
		{"domain: x\n---\ndomain: y", "f:2: a second document begins here; put each domain in a file of its own"},
		{"domain: x\ndomain: y", `f:2: "domain" is already in line 1`},
		{"domain: x\nlimits: []", `f:2: a file has no field "limits"; its fields are domain, descriptors`},
		{"domain: x\ndescriptors: 5", "f:2: descriptors has to be a list: lines that begin with - key:"},
		{begin + "- 5", "f:3: a descriptor has to be a mapping: lines of the form name: value"},
		{begin + "- {key: a, value: {b: c}}", "f:3: has to be text, not a list or a mapping"},
		{begin + "- {key: a, unit: hour}", `f:3: a descriptor has no field "unit"; its fields are key, value, rate_limit, ` +
			"descriptors, shadow_mode, quota_mode, detailed_metric, value_to_metric, share_threshold, metadata"},
		{begin + "- {key: a, shadow_mode: perhaps}", "f:3: shadow_mode has to be true or false"},
		{begin + "- {key: a, rate_limit: 5}", "f:3: rate_limit has to be a mapping: lines of the form name: value"},
		{begin + "- key: a\n  rate_limit:\n    requests_per_unit: 5", "f:5: rate_limit has no unit; write second, minute, hour, day, week, month or year"},
		{begin + "- {key: a, rate_limit: {unit: unknown}}", `f:3: there is no unit "unknown"; write second, minute, hour, day, week, month or year`},
		{begin + "- {key: a, rate_limit: {unit: day, requests_per_unit: 4294967296}}", "f:3: requests_per_unit has to be a whole number from 0 to 4294967295"},
		{begin + "- {key: a, rate_limit: {unit: day, requests_per_unit: 1.5}}", "f:3: requests_per_unit has to be a whole number from 0 to 4294967295"},
		{begin + "- {key: a, rate_limit: {unit: day, requests_per_unit: many}}", "f:3: requests_per_unit has to be a whole number from 0 to 4294967295"},
		{begin + "- {key: a, rate_limit: {unit: day, burst: 5}}", `f:3: rate_limit has no field "burst"; its fields are unit, requests_per_unit, unlimited, name, replaces`},
		{begin + "- {key: a, rate_limit: {unit: day, replaces: b}}", "f:3: replaces has to be a list: - name: the name of another rate_limit"},
		{begin + "- {key: a, rate_limit: {unit: day, replaces: [{}]}}", "f:3: an entry of replaces needs the name of another rate_limit"},
		{begin + "- {key: a, rate_limit: {unit: day, name: b, replaces: [{name: b}]}}", `f:3: rate_limit "b" replaces itself; name another one`},
		{begin + "- {key: a_b}\n- {key: a, value: b}", `f:4: the descriptor "a_b" is already in line 3; join the two`},
		{begin + "- {key: a, metadata: 5}", "f:3: metadata has to be a mapping: lines of the form name: value"},
		{begin + "- {key: a, metadata: {b: 2026-01-01}}", "f:3: the metadata has a value that is no text, number or boolean; put it in quotes"},
		{begin + "- key: a\n  descriptors:\n  - key: b\n  - key: b", `f:6: the descriptor "b" is already in line 5; join the two`},
		{begin + nested(65), "f:130: there are more than 64 rules within each other"},
		{"a: &a [1]\n" + begin + "- *a", `f:1: a file has no field "a"; its fields are domain, descriptors`},
		{begin + "- &a {key: a, descriptors: [*a]}", "f:3: there are more than 64 rules within each other"},
		{laughs(), "f:2: the file is too large, counting what its aliases stand for"},
	} {
		_, err := envoy.Load(map[string][]byte{"f": []byte(test.content)})
		require.EqualError(t, err, test.want, "%s", test.content)
		one, ok := errors.AsType[*envoy.ConfigError](err)
		require.True(t, ok)
		require.Equal(t, "f", one.File)
	}
}

// nested returns n rules within each other.
func nested(n int) string {
	var text strings.Builder
	for i := range n {
		space := strings.Repeat(" ", 2*i)
		text.WriteString(space + "- key: a\n" + space + "  descriptors:\n")
	}
	return text.String() + strings.Repeat(" ", 2*n) + "- key: a\n"
}

// laughs returns a short file whose aliases stand for 10^9 values.
func laughs() string {
	text := "domain: x\ndescriptors: [{key: a, metadata: {a0: &a0 [1,1,1,1,1,1,1,1,1,1]"
	for i := range 9 {
		from := "*a" + string(rune('0'+i))
		text += ", a" + string(rune('1'+i)) + ": &a" + string(rune('1'+i)) + " [" +
			strings.TrimSuffix(strings.Repeat(from+",", 10), ",") + "]"
	}
	return text + "}}]"
}

func TestLoadRefusesADomainInTwoFiles(t *testing.T) {
	t.Parallel()
	_, err := envoy.Load(map[string][]byte{"a": []byte("domain: x"), "b": []byte("domain: x")})
	require.EqualError(t, err, `b: has the domain "x", as a does; put all rules of a domain in one file`)
}

// Some files are more liberal than those of the recordings.
func TestLoadReads(t *testing.T) {
	t.Parallel()
	for _, content := range []string{
		"domain: x", "domain: x\ndescriptors:", "domain: 5\ndescriptors: []",
		"domain: x\ndescriptors:\n- {key: a, value: 404, rate_limit: {unit: MinUte, requests_per_unit: 0x10}}",
		"domain: x\ndescriptors:\n- {key: a, value: , rate_limit: , shadow_mode: yes}",
		"domain: x\ndescriptors:\n- {key: a, rate_limit: {unlimited: true, requests_per_unit: 5}}",
		"domain: x\ndescriptors:\n- {key: a, rate_limit: &l {unit: day}}\n- {key: b, rate_limit: *l}\n- {key: c, rate_limit: {<<: *l, unit: hour}}",
		"domain: x\ndescriptors:\n- &a {key: a}\n- {<<: [*a], value: b}",
		"domain: " + strings.Repeat("x", 122),
	} {
		_, err := envoy.Load(map[string][]byte{"f": []byte(content)})
		require.NoError(t, err, content)
	}
}

func TestTheExampleInTheDocsIsRead(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../docs/envoy.md")
	require.NoError(t, err)
	_, after, found := strings.Cut(string(text), "```yaml\n")
	require.True(t, found)
	example, _, _ := strings.Cut(after, "```")
	require.Equal(t, []string{"shop"}, rules(t, example).Domains())
}

func FuzzLoad(f *testing.F) {
	for _, folder := range []string{"configs", "bad"} {
		for _, content := range filesIn(f, folder) {
			f.Add(content)
		}
	}
	f.Add([]byte(laughs()))
	f.Fuzz(func(t *testing.T, content []byte) {
		config, err := envoy.Load(map[string][]byte{"f": content})
		if err != nil {
			_, ok := errors.AsType[*envoy.ConfigError](err)
			require.True(t, ok, "%T", err)
			require.Nil(t, config)
			return
		}
		require.Len(t, config.Domains(), 1)
	})
}
