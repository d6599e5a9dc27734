package httplimit

import (
	"log/slog"
	"net/http"
	"reflect"
	"sync"
	"sync/atomic"
)

// nesting logs, once, that a request is charged twice for the same key of the same limiter. This happens if the request
// passes the same middleware twice, or two middlewares that have the same limiter.
type nesting struct {
	told atomic.Bool
	seen atomic.Int64 // the number of requests
}

// The map inside has the middleware of each charge under way, and the variable open counts these charges. All
// middlewares share these variables, because two middlewares may have the same limiter.
//
//nolint:gochecknoglobals // all middlewares have to share them
var (
	inside sync.Map
	open   atomic.Int64
)

// visit identifies a charge: a request, its limiter, and the key that the request takes from.
type visit struct {
	request, limiter any
	key              string
}

// enter checks the first firstLooks requests, and later one of every laterLooks requests, because checking all would
// slow busy servers down.
const firstLooks, laterLooks = 1024, 64

// enter records that m charges a request, until leave is called. If the request is already being charged for the same
// key of the same limiter, enter logs this. The result ok tells whether leave must be called.
func (n *nesting) enter(
	m *middleware, w http.ResponseWriter, r *http.Request, l Limiter, key string,
) (v visit, ok bool) {
	if n.told.Load() {
		return v, false
	}
	seen := n.seen.Add(1)
	sampled := seen <= firstLooks || seen%laterLooks == 0
	if !sampled && open.Load() == 0 {
		return v, false
	}
	v = visit{requestOf(w, r), l, key}
	if v.request == nil {
		return v, false
	}
	if !reflect.ValueOf(l).Comparable() {
		v.limiter = m
	}
	if by, again := inside.Load(v); again {
		if n.told.Swap(true) {
			return v, false
		}
		message := "httplimit: a request passes this middleware twice, and is charged twice: mount it once, on the " +
			"router or on the route; interceptors of gRPC, chain them once"
		if by != any(m) {
			message = "httplimit: a request passes two middlewares that have the same limiter and find the same key, " +
				"and is charged twice: mount one of them, or give one a limiter with another name"
		}
		m.log(r.Context(), slog.LevelWarn, message)
		return v, false
	}
	if sampled {
		open.Add(1)
		inside.Store(v, m)
	}
	return v, sampled
}

func (v visit) leave() {
	inside.Delete(v)
	open.Add(-1)
}

// requestOf identifies a request by the address of its header, because copies of the request share the header. For a
// gRPC call the writer identifies it, because each interceptor makes a new header.
func requestOf(w http.ResponseWriter, r *http.Request) any {
	if call, ok := w.(interface{ CallOfGRPC() any }); ok {
		return call.CallOfGRPC()
	}
	if r.Header == nil {
		return nil
	}
	return reflect.ValueOf(r.Header).Pointer()
}
