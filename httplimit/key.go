package httplimit

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"hash"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode"
)

const (
	// maxHeaderKey is the longest value that ByHeader accepts, in bytes. Most servers accept no more in all header
	// lines together.
	maxHeaderKey = 8 << 10

	// minSecret is the length of the shortest secret, and hmacLen is how much of an HMAC is kept, both in bytes. With
	// 128 bits, the probability that any two of a billion keys have the same HMAC is 10^-21.
	minSecret = 16
	hmacLen   = 16
)

// Key finds the key that a request takes from. New refuses the zero Key.
type Key struct {
	find func(*http.Request, *proxyHint) (string, error)
	err  error // if not nil, New refuses the Key with this reason
}

// KeyError says why a request has no key. Its text contains nothing that the client sent.
type KeyError struct{ Reason string }

func (e *KeyError) Error() string { return "httplimit: no key: " + e.Reason }

// Of returns the key of a request. A function given to ByFunc can call it to choose between keys. Of returns a
// *KeyError, or the error of a function given to ByFunc.
func (k Key) Of(r *http.Request) (string, error) { return k.of(r, nil) }

// of is Of with a proxyHint. The argument hint may be nil.
func (k Key) of(r *http.Request, hint *proxyHint) (string, error) {
	switch {
	case k.err != nil:
		return "", k.err
	case k.find == nil:
		return "", &KeyError{Reason: "no Key was chosen"}
	}
	key, err := k.find(r, hint)
	if err == nil && key == "" {
		err = &KeyError{Reason: "it is empty"}
	}
	return key, err
}

// ByFunc uses the key that the function find returns. A key is at most 512 bytes of UTF-8 without NUL. Inside HMAC, a
// key may be any bytes. For a request without a key, find must return an error. If it returned a constant instead, all
// such requests would share one limit.
func ByFunc(find func(*http.Request) (string, error)) Key {
	if find == nil {
		return Key{err: errors.New("is ByFunc of no function")}
	}
	return Key{find: func(r *http.Request, _ *proxyHint) (string, error) { return find(r) }}
}

// ByHeader uses the value of a header as the key, such as an API key. A request has no key if the header is missing,
// occurs several times, or contains control characters. Clients choose their headers, so check the header first, or
// limit addresses too.
func ByHeader(name string) Key {
	if !isToken(name) {
		return Key{err: fmt.Errorf("is ByHeader(%q), which is no name of a header", name)}
	}
	canonical := http.CanonicalHeaderKey(name)
	return Key{find: func(r *http.Request, _ *proxyHint) (string, error) {
		values := r.Header[canonical]
		switch {
		case len(values) == 0 || len(values) == 1 && values[0] == "":
			return "", &KeyError{Reason: "there is no header " + canonical}
		case len(values) > 1:
			return "", &KeyError{Reason: "there are several headers " + canonical}
		case len(values[0]) > maxHeaderKey:
			return "", &KeyError{Reason: fmt.Sprintf("header %s has more than %d bytes", canonical, maxHeaderKey)}
		case strings.ContainsFunc(values[0], unicode.IsControl):
			return "", &KeyError{Reason: "there are control characters in header " + canonical}
		}
		return values[0], nil
	}}
}

// ByContext uses a string in the request's context as the key, such as the user that the application has authenticated.
// contextKey is the key of [context.Context.Value].
func ByContext(contextKey any) Key {
	if contextKey == nil {
		return Key{err: errors.New("is ByContext(nil)")}
	}
	return Key{find: func(r *http.Request, _ *proxyHint) (string, error) {
		return fromContext(r.Context(), contextKey)
	}}
}

func fromContext(ctx context.Context, contextKey any) (string, error) {
	value, ok := ctx.Value(contextKey).(string)
	if !ok || value == "" {
		return "", &KeyError{Reason: fmt.Sprintf("there is no string for a %T in the request's context", contextKey)}
	}
	return value, nil
}

// Join makes one key from several keys, for example from address and user. Two requests have the same key only if all
// their parts are the same, whatever characters the parts contain. A request without one of the parts has no key.
func Join(parts ...Key) Key {
	if len(parts) == 0 {
		return Key{err: errors.New("is Join of no keys")}
	}
	for _, part := range parts {
		if err := part.usable(); err != nil {
			return Key{err: fmt.Errorf("is Join of a key that %w", err)}
		}
	}
	escape := strings.NewReplacer(`\`, `\\`, `|`, `\|`)
	return Key{find: func(r *http.Request, hint *proxyHint) (string, error) {
		var joined strings.Builder
		for i, part := range parts {
			text, err := part.of(r, hint)
			if err != nil {
				return "", err
			}
			if i > 0 {
				joined.WriteByte('|')
			}
			_, _ = escape.WriteString(&joined, text) // a Builder does not fail
		}
		return joined.String(), nil
	}}
}

// First uses the first of several keys that a request has, for example the user's, or else the address. The key begins
// with the number of the one that was used, such as "1:alice" or "2:192.0.2.1". So a user named like an address has
// another limit than that address. A request that has none of them has no key. An error of a function given to ByFunc
// means that the request does not have that key.
func First(keys ...Key) Key {
	if len(keys) == 0 {
		return Key{err: errors.New("is First of no keys")}
	}
	for _, key := range keys {
		if err := key.usable(); err != nil {
			return Key{err: fmt.Errorf("is First of a key that %w", err)}
		}
	}
	keys = slices.Clone(keys)
	return Key{find: func(r *http.Request, hint *proxyHint) (text string, err error) {
		for i, key := range keys {
			if text, err = key.of(r, hint); err == nil {
				return strconv.Itoa(i+1) + ":" + text, nil
			}
		}
		return "", err
	}}
}

// HMAC keeps personal data out of the database. The database gets the first 128 bits of the key's HMAC-SHA-256, as 22
// characters of base64url. Without the secret nobody can tell which address or user a row belongs to. The secret has at
// least 16 random bytes, and is the same in all processes. A new secret makes new keys, so all counts restart. To reset
// a key, compute its HMAC in a shell: docs/cookbook.md has the line, under "Personal data".
func HMAC(secret []byte, key Key) Key {
	if len(secret) < minSecret {
		return Key{err: fmt.Errorf("is HMAC with a secret of %d bytes, and needs at least %d", len(secret), minSecret)}
	}
	if err := key.usable(); err != nil {
		return Key{err: fmt.Errorf("is HMAC of a key that %w", err)}
	}
	secret = slices.Clone(secret)
	type state struct {
		mac  hash.Hash
		text []byte
	}
	states := sync.Pool{New: func() any { return &state{mac: hmac.New(sha256.New, secret)} }}
	return Key{find: func(r *http.Request, hint *proxyHint) (string, error) {
		text, err := key.of(r, hint)
		if err != nil {
			return "", err
		}
		s := states.Get().(*state)
		defer states.Put(s)
		s.mac.Reset()
		s.text = append(s.text[:0], text...)
		_, _ = s.mac.Write(s.text) // a hash does not fail
		s.text = s.mac.Sum(s.text[:0])
		s.text = base64.RawURLEncoding.AppendEncode(s.text, s.text[:hmacLen])
		return string(s.text[sha256.Size:]), nil
	}}
}

// usable returns an error if New must refuse the key. The error's text completes a sentence that begins with the
// field's name.
func (k Key) usable() error {
	if k.err == nil && k.find == nil {
		return errors.New("is none")
	}
	return k.err
}

// isToken tells whether text is a token of HTTP, such as the name of a header.
func isToken(text string) bool {
	return text != "" && !strings.ContainsFunc(text, func(c rune) bool { return !isTokenChar(c) })
}

func isTokenChar(c rune) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' ||
		strings.ContainsRune("!#$%&'*+-.^_`|~", c)
}
