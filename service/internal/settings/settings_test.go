package settings_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/service/internal/settings"
)

// An error names one line: that of the mistake.
func TestErrorsHaveTheirLine(t *testing.T) {
	t.Parallel()
	const begin = "limiters:\n- name: a\n  policy: fixed 1/1m\n- name: b\n"
	for _, test := range []struct{ content, want string }{
		{"limiters: 5", "f:1: limiters has to be a list: lines that begin with - name:"},
		{begin + "domain: shop", `f:5: the field "domain" is unknown; the fields are limiters; ` +
			"put a domain of Envoy's into a file of its own"},
		{begin + "  policy: fixed 1/1m\n- 5", "f:6: a limiter has to be a mapping: lines of the form name: value"},
		{begin, "f:4: the limiter has no policy; write policy: sliding 10/1m"},
		{"limiters:\n- policy: fixed 1/1m\n", "f:2: the limiter has no name; write name: login"},
		{begin + "  policy: fixed 1/1m\n  limit: 5", `f:6: the field "limit" is unknown; ` +
			"the fields are name, policy, durable, synchronous_commit, on_failure"},
		{begin + "  policy: fixed 1/1m\n\n  policy: fixed 2/1m", "f:7: the field policy is there twice"},
		{begin + "  policy: [fixed 1/1m]", "f:5: policy has to be text"},
		{begin + "  policy: fixed 1/1m\n  durable: perhaps", "f:6: durable has to be true or false"},
		{begin + "  policy: fixed 1/1m\n  durable: true\n  synchronous_commit: {}",
			"f:7: synchronous_commit has to be true or false"},
		{begin + "  policy: fixed 1/1m\n  on_failure: wait", `f:6: "wait" is no answer while Postgres is away; ` +
			"write error, allow, deny, or local 0.5 for half of the limit"},
		{begin + "  policy: fixed 1/1m\n- name: a\n  policy: fixed 1/1m",
			`f:6: there is a limiter "a" already, in f:2; remove one, or give it another name`},
	} {
		_, err := settings.Load(map[string][]byte{"f": []byte(test.content)})
		require.EqualError(t, err, test.want, test.content)
	}
	_, err := settings.Load(map[string][]byte{"f": []byte(begin + "  policy: often")})
	require.ErrorContains(t, err, `f:5: ratelimit: policy "often": `)

	// A field without a value is as good as none.
	s, err := settings.Load(map[string][]byte{"f": []byte(begin + "  policy: fixed 1/1m\n  durable:\n  on_failure:\n")})
	require.NoError(t, err)
	require.Len(t, s.Limiters, 2)
	require.Equal(t, 4, s.Limiters["b"].Line)
}
