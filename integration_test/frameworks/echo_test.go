package frameworks

import (
	"io"
	"net/http"
	"testing"

	"github.com/labstack/echo/v4"
	"github.com/labstack/echo/v4/middleware"
)

// With echo.WrapMiddleware, a handler writes to the middleware's writer. But echo writes the errors that a handler
// returns after the middleware has returned. So the middleware does not see these errors, and charges the requests.
// That is wrong only if an error handler turns an error into a success.
func testEcho(t *testing.T) {
	requireCharges(t, served(t, echoWith(middleware.Recover(), echo.WrapMiddleware(newLimit(t)))), true, false)
}

func testEchoWithItsRecovererBehind(t *testing.T) {
	requireCharges(t, served(t, echoWith(echo.WrapMiddleware(newLimit(t)), middleware.Recover())), true, false)
}

func echoWith(middleware ...echo.MiddlewareFunc) *echo.Echo {
	e := echo.New()
	e.Logger.SetOutput(io.Discard)
	e.Use(func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			err := next(c)
			if c.Path() == overruled {
				err = c.NoContent(http.StatusUnauthorized)
			}
			return err
		}
	})
	e.Use(middleware...)
	e.GET(good, func(c echo.Context) error { return c.String(http.StatusOK, "welcome") })
	e.GET(nothing, func(echo.Context) error { return nil })
	e.GET(wrong, func(c echo.Context) error { return c.NoContent(http.StatusUnauthorized) })
	e.GET(refused, func(echo.Context) error { return echo.NewHTTPError(http.StatusUnauthorized) })
	e.GET(panics, func(echo.Context) error { panic("oh") })
	e.GET(failedCopy, func(c echo.Context) error {
		if _, err := io.Copy(c.Response().Writer, upstream); err != nil {
			return c.NoContent(http.StatusUnauthorized)
		}
		return nil
	})
	e.GET(overruled, func(echo.Context) error { return nil })
	e.GET(hijacked, func(c echo.Context) error {
		writeRaw(c.Response().Hijack())
		return nil
	})
	return e
}
