package frameworks

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/gofiber/fiber/v2"
	"github.com/gofiber/fiber/v2/middleware/adaptor"
	recoverer "github.com/gofiber/fiber/v2/middleware/recover"
	"github.com/gofiber/fiber/v2/utils"

	"github.com/pgratelimit/ratelimit"
)

// Through fiber's adaptor the middleware has returned before the handler begins, so everything is charged.
func testFiberAdaptor(t *testing.T) {
	requireCharges(t, fiberWith(t, adaptor.HTTPMiddleware(newLimit(t))), false, false)
}

// limitFiber charges failures: it takes first, lets fiber run, and gives back what came to a success. An error that a handler returns has
// no status yet, and is a failure.
func limitFiber(limiter *ratelimit.Limiter, key func(*fiber.Ctx) string) fiber.Handler {
	return func(c *fiber.Ctx) error {
		key := utils.CopyString(key(c)) // fiber uses the memory of its strings again
		result, err := limiter.Allow(c.UserContext(), key)
		switch {
		case err != nil:
			return fiber.ErrServiceUnavailable
		case !result.Allowed:
			c.Set(fiber.HeaderRetryAfter, retryAfter(result))
			return fiber.ErrTooManyRequests
		}
		err = c.Next() // a panic passes, and stays charged
		if err == nil && c.Response().StatusCode() < 400 {
			giveBack(c.UserContext(), limiter, result)
		}
		return err
	}
}

func testFiberNative(t *testing.T) {
	path := func(c *fiber.Ctx) string { return c.Path() }
	requireCharges(t, fiberWith(t, limitFiber(newLimiter(t), path)), true, true)
}

func fiberWith(t *testing.T, limit fiber.Handler) (ask func(path string) int) {
	app := fiber.New()
	app.Use(recoverer.New(), limit)
	app.Get(good, func(c *fiber.Ctx) error { return c.SendString("welcome") })
	app.Get(nothing, func(*fiber.Ctx) error { return nil })
	app.Get(wrong, func(c *fiber.Ctx) error { return c.SendStatus(http.StatusUnauthorized) })
	app.Get(refused, func(*fiber.Ctx) error { return fiber.NewError(http.StatusUnauthorized) })
	app.Get(panics, func(*fiber.Ctx) error { panic("oh") })
	return func(path string) int {
		request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
		return status(t, request, func(r *http.Request) (*http.Response, error) { return app.Test(r, -1) })
	}
}
