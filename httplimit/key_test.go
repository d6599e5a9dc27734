package httplimit

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// text returns a Key that finds the same key for all requests.
func text(key string) Key { return ByFunc(func(*http.Request) (string, error) { return key, nil }) }

func requireKey(t *testing.T, want string, key Key, r *http.Request) {
	t.Helper()
	require.NoError(t, key.usable())
	got, err := key.Of(r)
	require.NoError(t, err)
	require.Equal(t, want, got)
}

func TestKeys(t *testing.T) {
	t.Parallel()

	r := httptest.NewRequestWithContext(context.WithValue(t.Context(), contextKey{}, "alice"), http.MethodGet, "/", nil)
	r.Header.Set("X-Api-Key", "k-1")
	requireKey(t, "k-1", ByHeader("x-api-key"), r)
	requireKey(t, "alice", ByContext(contextKey{}), r)
	requireKey(t, "192.0.2.1|alice|k-1", Join(ByIP(), ByContext(contextKey{}), ByHeader("X-Api-Key")), r)

	_, err := Key{}.Of(r)
	require.Error(t, err)
	_, err = ByHeader("").Of(r)
	require.Error(t, err)
}

// First uses the first key that a request has. What a client calls itself never makes it the key of somebody else.
func TestFirst(t *testing.T) {
	t.Parallel()

	nobody := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
	as := func(user string) *http.Request {
		return nobody.WithContext(context.WithValue(t.Context(), contextKey{}, user))
	}
	keys := []Key{ByContext(contextKey{}), ByHeader("X-Api-Key"), ByIP()}
	first := First(keys...)
	keys[0] = text("changed") // First has copied the keys
	requireKey(t, "3:192.0.2.1", first, nobody)
	requireKey(t, "1:alice", first, as("alice"))
	requireKey(t, "1:192.0.2.1", first, as("192.0.2.1"))
	requireKey(t, "1:3:192.0.2.1", first, as("3:192.0.2.1"))
	nobody.Header.Set("X-Api-Key", "192.0.2.1")
	requireKey(t, "2:192.0.2.1", first, nobody)

	lost := ByFunc(func(*http.Request) (string, error) { return "", errors.New("no session") })
	requireKey(t, "2:192.0.2.1", First(lost, ByIP()), nobody)
	requireKey(t, "2:192.0.2.1", First(text(""), ByIP()), nobody)
	_, err := First(lost, ByHeader("X-Other")).Of(nobody)
	require.EqualError(t, err, "httplimit: no key: there is no header X-Other")
}

// HMAC accepts a header's value that is too long for a key.
func TestLongHeader(t *testing.T) {
	t.Parallel()

	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
	r.Header.Set("Authorization", strings.Repeat("x", maxHeaderKey))
	key, err := HMAC(make([]byte, 16), ByHeader("Authorization")).Of(r)
	require.NoError(t, err)
	require.Len(t, key, 22)
}

// The expected value was computed with: printf '192.0.2.1' | openssl dgst -sha256 -mac HMAC -macopt hexkey:000102…0f
// -binary | head -c 16 | basenc --base64url
func TestHMACKeepsPersonalDataOut(t *testing.T) {
	t.Parallel()

	secret := []byte("\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f")
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
	hashed := HMAC(secret, ByIP())
	requireKey(t, "vFChl-_N4dB-16z8JbdWhg", hashed, r)
	secret[0]++ // HMAC has copied the secret
	requireKey(t, "vFChl-_N4dB-16z8JbdWhg", hashed, r)
	other, err := HMAC(secret, ByIP()).Of(r)
	require.NoError(t, err)
	require.NotEqual(t, "vFChl-_N4dB-16z8JbdWhg", other)
}

func TestJoinIsUnambiguous(t *testing.T) {
	t.Parallel()

	seen := map[string][2]string{}
	for _, first := range joinParts() {
		for _, second := range joinParts() {
			joined, err := Join(text(first), text(second)).Of(nil)
			require.NoError(t, err)
			require.NotContains(t, seen, joined, "%q and %q", first, second)
			seen[joined] = [2]string{first, second}
		}
	}
}

func joinParts() []string {
	return []string{"a", "|", `\`, `\|`, `|\`, `\\`, "||", `a|`, `|a`, `a\`, `\a`, "a|a", `a\|a`, "é", "\x00", "\xff"}
}

// FuzzJoin splits joined keys, and compares the parts.
func FuzzJoin(f *testing.F) {
	for _, part := range joinParts() {
		f.Add(part, `x|\`, part)
	}
	f.Fuzz(func(t *testing.T, a, b, c string) {
		joined, err := Join(text(a), text(b), text(c)).Of(nil)
		if a == "" || b == "" || c == "" {
			require.Error(t, err)
			return
		}
		require.NoError(t, err)
		parts := []string{""}
		for i := 0; i < len(joined); i++ {
			last := &parts[len(parts)-1]
			switch joined[i] {
			case '|':
				parts = append(parts, "")
			case '\\':
				i++
				*last += joined[i : i+1]
			default:
				*last += joined[i : i+1]
			}
		}
		require.Equal(t, []string{a, b, c}, parts)
	})
}

// FuzzByHeader tests that the key is the header's value, or that the error does not contain the value.
func FuzzByHeader(f *testing.F) {
	f.Add("secret", "", false)
	f.Add("a\x00b", "x", true)
	f.Fuzz(func(t *testing.T, value, second string, several bool) {
		r := httptest.NewRequest(http.MethodGet, "/", nil) //nolint:noctx // nobody leaves
		r.Header["X-Api-Key"] = []string{value}
		if several {
			r.Header.Add("X-Api-Key", second)
		}
		key, err := ByHeader("X-Api-Key").Of(r)
		if err != nil {
			require.Empty(t, key)
			if len(value) > 20 {
				require.NotContains(t, err.Error(), value)
			}
			return
		}
		require.False(t, several)
		require.Equal(t, value, key)
		require.NotEmpty(t, key)
		require.LessOrEqual(t, len(key), maxHeaderKey)
	})
}
