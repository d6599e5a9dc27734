package frameworks

import (
	"io"
	"net"
	"net/http"
	"testing"

	"github.com/gofiber/fiber/v2"
	"github.com/gofiber/fiber/v2/middleware/adaptor"
	recoverer "github.com/gofiber/fiber/v2/middleware/recover"
	"github.com/gofiber/fiber/v2/utils"
	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"

	"github.com/pgratelimit/ratelimit"
)

// With fiber's adaptor, the middleware returns before the handler begins. So the middleware charges every request.
func testFiberAdaptor(t *testing.T) {
	requireCharges(t, fiberWith(t, adaptor.HTTPMiddleware(newLimit(t))), false, false)
}

// limitFiberThroughout charges failures. It takes first, runs fiber, and leaves a function that refunds a success.
// settleFiber calls that function. Without settleFiber, every request stays charged.
func limitFiberThroughout(limiter *ratelimit.Limiter, key func(*fiber.Ctx) string) fiber.Handler {
	return func(c *fiber.Ctx) error {
		key := utils.CopyString(key(c)) // fiber reuses the memory of its strings
		result, err := limiter.Allow(c.UserContext(), key)
		switch {
		case err != nil:
			return fiber.ErrServiceUnavailable
		case !result.Allowed:
			c.Set(fiber.HeaderRetryAfter, retryAfter(result))
			return fiber.ErrTooManyRequests
		}
		ctx := c.UserContext()
		c.Locals(refund{}, func() { giveBack(ctx, limiter, result) })
		return c.Next()
	}
}

type refund struct{}

// settleFiber refunds requests that succeeded. It wraps the whole app, because middleware and the error handler may
// still change an unsent response. If a handler takes over the connection, the status is unknown, and nothing is
// refunded.
func settleFiber(app *fiber.App) {
	next := app.Server().Handler
	app.Server().Handler = func(ctx *fasthttp.RequestCtx) {
		next(ctx)
		giveBack, taken := ctx.UserValue(refund{}).(func())
		if taken && ctx.Response.StatusCode() < 400 && !ctx.Hijacked() && ctx.LastTimeoutErrorResponse() == nil {
			giveBack()
		}
	}
}

func testFiberNative(t *testing.T) {
	path := func(c *fiber.Ctx) string { return c.Path() }
	requireCharges(t, fiberWith(t, limitFiberThroughout(newLimiter(t), path)), true, true)
}

func fiberWith(t *testing.T, limit fiber.Handler) (ask func(path string) int) {
	t.Helper()
	app := fiber.New(fiber.Config{DisableStartupMessage: true})
	settleFiber(app)
	app.Use(recoverer.New(), func(c *fiber.Ctx) error {
		err := c.Next()
		if err == nil && c.Path() == overruled && c.Response().StatusCode() < 400 {
			err = c.SendStatus(http.StatusUnauthorized)
		}
		return err
	}, limit)
	app.Get(good, func(c *fiber.Ctx) error { return c.SendString("welcome") })
	app.Get(nothing, func(*fiber.Ctx) error { return nil })
	app.Get(wrong, func(c *fiber.Ctx) error { return c.SendStatus(http.StatusUnauthorized) })
	app.Get(refused, func(*fiber.Ctx) error { return fiber.NewError(http.StatusUnauthorized) })
	app.Get(panics, func(*fiber.Ctx) error { panic("oh") })
	app.Get(failedCopy, func(c *fiber.Ctx) error {
		if _, err := io.Copy(c, upstream); err != nil {
			return c.SendStatus(http.StatusUnauthorized)
		}
		return nil
	})
	app.Get(overruled, func(c *fiber.Ctx) error { return c.SendString("welcome") })
	app.Get(hijacked, func(c *fiber.Ctx) error {
		c.Context().HijackSetNoResponse(true)
		c.Context().Hijack(func(conn net.Conn) { writeRaw(conn, nil, nil) })
		return nil
	})
	url := serveFiber(t, app)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	return func(path string) int {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+path, nil)
		require.NoError(t, err)
		return status(t, request, client.Do)
	}
}

// serveFiber serves an app, and returns its URL.
func serveFiber(t *testing.T, app *fiber.App) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- app.Listener(listener) }()
	t.Cleanup(func() {
		require.NoError(t, app.Shutdown())
		require.NoError(t, <-served)
	})
	return "http://" + listener.Addr().String()
}
