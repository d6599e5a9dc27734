package frameworks

import (
	"io"
	"net/http"
	"testing"

	"github.com/labstack/echo/v4"
	"github.com/labstack/echo/v4/middleware"
)

// Through echo.WrapMiddleware a handler writes to the middleware's writer, but the errors that it returns are written after the
// middleware has returned. So they are not seen, and charged, which is right unless somebody's error handler makes a success of them.
func testEcho(t *testing.T) {
	requireCharges(t, served(t, echoWith(middleware.Recover(), echo.WrapMiddleware(newLimit(t)))), true, false)
}

func testEchoWithItsRecovererBehind(t *testing.T) {
	requireCharges(t, served(t, echoWith(echo.WrapMiddleware(newLimit(t)), middleware.Recover())), true, false)
}

func echoWith(middleware ...echo.MiddlewareFunc) *echo.Echo {
	e := echo.New()
	e.Logger.SetOutput(io.Discard)
	e.Use(middleware...)
	e.GET(good, func(c echo.Context) error { return c.String(http.StatusOK, "welcome") })
	e.GET(nothing, func(echo.Context) error { return nil })
	e.GET(wrong, func(c echo.Context) error { return c.NoContent(http.StatusUnauthorized) })
	e.GET(refused, func(echo.Context) error { return echo.NewHTTPError(http.StatusUnauthorized) })
	e.GET(panics, func(echo.Context) error { panic("oh") })
	return e
}
