package httplimit

import (
	"log/slog"
	"net/http"
	"reflect"
	"sync"
	"sync/atomic"
)

// nesting tells the operator, once, that a request passes the same middleware twice, and is charged twice. A request is
// known by its header, which copies of it share.
type nesting struct {
	told   atomic.Bool
	seen   atomic.Int64 // requests
	open   atomic.Int64 // how many requests are in inside
	inside sync.Map     // of addresses of headers
}

// The first requests are all looked at, and of others one in so many, so that busy servers are not slowed down.
const firstLooks, laterLooks = 1024, 64

// enter notes that a request is inside of the middleware, until leave, or tells that it already was.
func (n *nesting) enter(m *middleware, r *http.Request) (request uintptr, ok bool) {
	if n.told.Load() || r.Header == nil {
		return 0, false
	}
	request = reflect.ValueOf(r.Header).Pointer()
	if n.open.Load() > 0 {
		if _, again := n.inside.Load(request); again {
			if !n.told.Swap(true) {
				m.log(r.Context(), slog.LevelWarn, "httplimit: a request passes this middleware twice, and is charged "+
					"twice: mount it once, on the router or on the route")
			}
			return 0, false
		}
	}
	if seen := n.seen.Add(1); seen > firstLooks && seen%laterLooks != 0 {
		return 0, false
	}
	n.open.Add(1)
	n.inside.Store(request, nil)
	return request, true
}

func (n *nesting) leave(request uintptr) {
	n.inside.Delete(request)
	n.open.Add(-1)
}
