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
	"strings"
	"sync"
	"unicode"
)

const (
	// maxHeaderKey is the longest value that ByHeader takes, in bytes. Most servers accept about as much in all header
	// lines together.
	maxHeaderKey = 8 << 10

	// minSecret is the shortest secret, and hmacLen is the part of an HMAC that is kept, both in bytes. With 128 bits,
	// the probability that any two of a billion keys get the same HMAC is 10^-21.
	minSecret = 16
	hmacLen   = 16
)

// Key says who is charged for a request. New refuses the zero Key.
type Key struct {
	find func(*http.Request, *proxyHint) (string, error)
	err  error // why New refuses it
}

// KeyError says why a request has no key. Its text repeats nothing that the client sent.
type KeyError struct{ Reason string }

func (e *KeyError) Error() string { return "httplimit: no key: " + e.Reason }

// Of returns the key of a request, for functions that choose between keys. It returns a *KeyError, or the error of a
// function given to ByFunc.
func (k Key) Of(r *http.Request) (string, error) { return k.of(r, nil) }

// of is Of with a proxyHint, which may be nil.
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

// ByFunc is any key. find returns it, or an error if the request has none. A key is at most 512 bytes of UTF-8 without
// NUL, or any bytes inside HMAC. Return an error for a request without a key, not some common key: all such requests
// would share one limit.
func ByFunc(find func(*http.Request) (string, error)) Key {
	if find == nil {
		return Key{err: errors.New("is ByFunc of no function")}
	}
	return Key{find: func(r *http.Request, _ *proxyHint) (string, error) { return find(r) }}
}

// ByHeader is the value of a header, for API keys and the like. A request has no key if it lacks the header, has
// several of it, or has control characters in it. Clients choose their headers, so check the header first, or limit
// addresses too.
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

// ByContext is a string in the request's context, such as the user that the application's authentication put there.
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

// Join makes one key of several, for example of address and user. Two requests have the same key only if all parts are
// the same, whatever characters they contain. A request that lacks a part has no key.
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

// HMAC keeps personal data out of the database. The database gets the first 128 bits of the key's HMAC-SHA-256, as 22
// characters of base64url. Without the secret nobody can tell which address or user a row belongs to. The secret has at
// least 16 random bytes and is the same in all processes. A new secret makes new keys, so all counts begin anew. To use
// a key elsewhere, such as in `pgratelimit reset`, compute it the same way.
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

// usable returns why New refuses a key. Its text follows the field's name in a sentence.
func (k Key) usable() error {
	if k.err == nil && k.find == nil {
		return errors.New("is none")
	}
	return k.err
}

// isToken tells whether a text is a token of HTTP, such as the name of a header.
func isToken(text string) bool {
	return text != "" && !strings.ContainsFunc(text, func(c rune) bool { return !isTokenChar(c) })
}

func isTokenChar(c rune) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' ||
		strings.ContainsRune("!#$%&'*+-.^_`|~", c)
}
