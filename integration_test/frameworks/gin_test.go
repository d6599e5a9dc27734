package frameworks

import (
	"io"
	"net/http"
	"testing"

	"github.com/gin-gonic/gin"

	"github.com/pgratelimit/ratelimit"
)

// limitGin mounts net/http's middleware, which sees what handlers write.
func limitGin(limit func(http.Handler) http.Handler) gin.HandlerFunc {
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

// ginWriter is gin's writer, but what is sent goes through the middleware's first.
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
	requireCharges(t, served(t, ginWith(limitGin(newLimit(t)))), true, false)
}

// limitGinBlindly is the adapter that is found most often. Handlers write past the middleware, so everything is charged.
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

// limitGinNatively charges failures without net/http's middleware: it takes first, lets gin run, and gives back what came to a success. In
// doubt it gives nothing back: where nothing is written yet, an error handler in front may still write an error.
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
			c.Next() // a panic passes, and stays charged
			if c.Writer.Written() && c.Writer.Status() < 400 && c.Request.Context().Err() == nil {
				giveBack(c.Request.Context(), limiter, result)
			}
		}
	}
}

func testGinNative(t *testing.T) {
	path := func(c *gin.Context) string { return c.Request.URL.Path }
	requireCharges(t, served(t, ginWith(limitGinNatively(newLimiter(t), path))), true, false)
}

func ginWith(limit gin.HandlerFunc) http.Handler {
	gin.SetMode(gin.ReleaseMode)
	r := gin.New()
	r.Use(gin.RecoveryWithWriter(io.Discard), limit)
	r.GET(good, func(c *gin.Context) { c.String(http.StatusOK, "welcome") })
	r.GET(nothing, func(*gin.Context) {})
	r.GET(wrong, func(c *gin.Context) { c.JSON(http.StatusUnauthorized, gin.H{"error": "no"}) })
	r.GET(refused, func(c *gin.Context) { c.AbortWithStatus(http.StatusUnauthorized) })
	r.GET(panics, func(*gin.Context) { panic("oh") })
	return r
}
