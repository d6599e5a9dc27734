package frameworks

import (
	"errors"
	"io"
	"net/http"
	"testing"

	"github.com/gin-gonic/gin"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
)

// limitGinThroughout mounts middleware of net/http so that it sees everything that handlers write. So the header fields
// of Config.Headers are right.
func limitGinThroughout(limit func(http.Handler) http.Handler) gin.HandlerFunc {
	return func(c *gin.Context) {
		own, passed := c.Writer, false
		limit(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			c.Writer, c.Request, passed = ginWriter{own, w}, r, true
			c.Next()
		})).ServeHTTP(own, c.Request)
		c.Writer = own
		if !passed {
			c.Abort()
		}
	}
}

// ginWriter is gin's writer, but sends everything through the middleware's writer first.
type ginWriter struct {
	gin.ResponseWriter
	limited http.ResponseWriter
}

func (w ginWriter) WriteHeaderNow() {
	if !w.Written() {
		w.limited.WriteHeader(w.Status())
	}
	w.ResponseWriter.WriteHeaderNow()
}

func (w ginWriter) Write(data []byte) (int, error) {
	w.WriteHeaderNow()
	return w.ResponseWriter.Write(data)
}

func (w ginWriter) WriteString(text string) (int, error) {
	w.WriteHeaderNow()
	return w.ResponseWriter.WriteString(text)
}

func (w ginWriter) Flush() {
	w.WriteHeaderNow()
	w.ResponseWriter.Flush()
}

func testGin(t *testing.T) {
	requireCharges(t, served(t, ginWith(limitGinThroughout(newLimit(t)))), true, false)
}

// testGinByStatus tests limitGin, which is in docs/cookbook.md.
func testGinByStatus(t *testing.T) {
	ask := served(t, ginWith(limitGin(newLimit(t))))
	requireCharges(t, ask, true, false)
	for range 4 {
		require.Equal(t, http.StatusNoContent, ask("/sent"))
	}
}

// limitGinBlindly is the most common adapter. Handlers write past the middleware, so it charges every request.
func limitGinBlindly(limit func(http.Handler) http.Handler) gin.HandlerFunc {
	return func(c *gin.Context) {
		passed := false
		limit(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			c.Request, passed = r, true
			c.Next()
		})).ServeHTTP(c.Writer, c.Request)
		if !passed {
			c.Abort()
		}
	}
}

func testGinPassedBy(t *testing.T) {
	requireCharges(t, served(t, ginWith(limitGinBlindly(newLimit(t)))), false, false)
}

// limitGinNatively charges failures without middleware of net/http. It takes first, runs gin, and refunds a success. If
// the outcome is unclear, it refunds nothing.
func limitGinNatively(limiter *ratelimit.Limiter, key func(*gin.Context) string) gin.HandlerFunc {
	return func(c *gin.Context) {
		result, err := limiter.Allow(c.Request.Context(), key(c))
		switch {
		case err != nil:
			c.AbortWithStatus(http.StatusServiceUnavailable)
		case !result.Allowed:
			c.Header("Retry-After", retryAfter(result))
			c.AbortWithStatus(http.StatusTooManyRequests)
		default:
			w, ctx := c.Writer, c.Request.Context()
			c.Next() // a panic passes through, and its request stays charged
			if succeeded(w) && ctx.Err() == nil {
				giveBack(ctx, limiter, result)
			}
		}
	}
}

// succeeded returns whether a success was sent. Before anything is written, an outer error handler may still write an
// error. If a handler has taken over the connection, the status is unknown, although gin's writer says 200.
func succeeded(w gin.ResponseWriter) bool {
	if !w.Written() || w.Status() >= 400 {
		return false
	}
	_, err := w.Write(nil)
	return !errors.Is(err, http.ErrHijacked)
}

func testGinNative(t *testing.T) {
	path := func(c *gin.Context) string { return c.Request.URL.Path }
	requireCharges(t, served(t, ginWith(limitGinNatively(newLimiter(t), path))), true, false)
}

func ginWith(limit gin.HandlerFunc) http.Handler {
	gin.SetMode(gin.ReleaseMode)
	r := gin.New()
	r.Use(gin.RecoveryWithWriter(io.Discard), overruleGin, limit)
	r.GET(good, func(c *gin.Context) { c.String(http.StatusOK, "welcome") })
	r.GET(nothing, func(*gin.Context) {})
	r.GET(wrong, func(c *gin.Context) { c.JSON(http.StatusUnauthorized, gin.H{"error": "no"}) })
	r.GET(refused, func(c *gin.Context) { c.AbortWithStatus(http.StatusUnauthorized) })
	r.GET(panics, func(*gin.Context) { panic("oh") })
	r.GET(failedCopy, func(c *gin.Context) {
		if _, err := io.Copy(c.Writer, upstream); err != nil {
			c.AbortWithStatus(http.StatusUnauthorized)
		}
	})
	r.GET(overruled, func(c *gin.Context) { c.Status(http.StatusNoContent) })
	r.GET("/sent", func(c *gin.Context) {
		c.Status(http.StatusNoContent)
		c.Writer.WriteHeaderNow()
	})
	r.GET(hijacked, func(c *gin.Context) { writeRaw(c.Writer.Hijack()) })
	return r
}

// overruleGin runs before a limit. gin's writer holds a status back until there is a body, so overruleGin can still
// change the status.
func overruleGin(c *gin.Context) {
	c.Next()
	if c.Request.URL.Path == overruled {
		c.AbortWithStatus(http.StatusUnauthorized)
	}
}

// Around a handler of net/http, the middleware writes to gin's writer. The status there may be old, and may still
// change.
func testGinAround(t *testing.T) {
	gin.SetMode(gin.ReleaseMode)
	r := gin.New()
	r.Use(gin.RecoveryWithWriter(io.Discard), overruleGin)
	limit := newLimit(t)
	get := func(path string, handler http.HandlerFunc) { r.GET(path, gin.WrapH(limit(handler))) }
	get(good, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "welcome") })
	get(nothing, func(http.ResponseWriter, *http.Request) {})
	get(wrong, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) })
	get(panics, func(http.ResponseWriter, *http.Request) { panic("oh") })
	get(failedCopy, func(w http.ResponseWriter, _ *http.Request) {
		if _, err := io.Copy(w, upstream); err != nil {
			http.Error(w, "no", http.StatusUnauthorized)
		}
	})
	get(overruled, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	get(hijacked, func(w http.ResponseWriter, _ *http.Request) { writeRaw(w.(http.Hijacker).Hijack()) })
	r.GET(
		refused,
		func(c *gin.Context) { c.Status(http.StatusUnauthorized) },
		gin.WrapH(
			limit(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "no") })),
		),
	)
	requireCharges(t, served(t, r), true, false)
}
