package frameworks

import (
	"math"
	"net/http"
	"net/http/httptest"
	neturl "net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"
	"github.com/go-chi/chi/v5"
	"github.com/gofiber/fiber/v2"
	"github.com/gofiber/fiber/v2/middleware/adaptor"
	"github.com/gofiber/fiber/v2/utils"
	"github.com/labstack/echo/v4"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
)

// This file has the code for web frameworks in docs/cookbook.md, and tests it.

var secret = []byte("sixteen bytes or more")

// password is the right password of every user.
const password = "swordfish"

// limitLogIn is the limit of "A log-in" in the cookbook, for chi, echo and gin.
func limitLogIn(t *testing.T) func(http.Handler) http.Handler {
	t.Helper()
	name := httplimit.ByFunc(func(r *http.Request) (string, error) { return r.PostFormValue("name"), nil })
	limit, err := httplimit.New(patient{newLimiter(t)}, httplimit.Config{
		Key:    httplimit.HMAC(secret, httplimit.Join(httplimit.ByIP(), name)),
		Charge: httplimit.ChargeFailures,
	})
	require.NoError(t, err)
	return limit
}

func recipeChi(limit func(http.Handler) http.Handler) http.Handler {
	logIn := func(w http.ResponseWriter, r *http.Request) {
		if r.PostFormValue("password") != password {
			http.Error(w, "wrong", http.StatusUnauthorized)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	}

	r := chi.NewRouter()
	r.With(limit).Post("/login", logIn)
	return r
}

func recipeEcho(limit func(http.Handler) http.Handler) http.Handler {
	logIn := func(c echo.Context) error {
		if c.FormValue("password") != password {
			return echo.ErrUnauthorized
		}
		return c.NoContent(http.StatusNoContent)
	}

	e := echo.New()
	e.POST("/login", logIn, echo.WrapMiddleware(limit))
	return e
}

// limitGin mounts the middleware, and passes it the status that gin has sent.
func limitGin(limit func(http.Handler) http.Handler) gin.HandlerFunc {
	return func(c *gin.Context) {
		passed := false
		limit(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			passed = true
			c.Next()
			if c.Writer.Size() > 0 || c.Writer.Written() && c.Writer.Status() != http.StatusOK {
				w.WriteHeader(c.Writer.Status())
			}
		})).ServeHTTP(c.Writer, c.Request)
		if !passed {
			c.Abort()
		}
	}
}

func recipeGin(limit func(http.Handler) http.Handler) http.Handler {
	logIn := func(c *gin.Context) {
		if c.PostForm("password") != password {
			c.JSON(http.StatusUnauthorized, gin.H{"error": "wrong"})
			return
		}
		c.JSON(http.StatusOK, gin.H{"welcome": c.PostForm("name")})
	}

	r := gin.New()
	r.POST("/login", limitGin(limit), logIn)
	return r
}

// limitFiber charges failures. It converts the request to net/http's form to compute the key.
func limitFiber(limiter *ratelimit.Limiter, by httplimit.Key) fiber.Handler {
	return func(c *fiber.Ctx) error {
		r, err := adaptor.ConvertRequest(c, true)
		if err != nil {
			return fiber.ErrBadRequest
		}
		key, err := by.Of(r)
		if err != nil {
			return fiber.ErrBadRequest
		}
		result, err := limiter.Allow(c.UserContext(), utils.CopyString(key)) // fiber reuses the memory of its strings
		switch {
		case err != nil || result.Source == ratelimit.SourceFailedClosed:
			return fiber.ErrServiceUnavailable
		case !result.Allowed:
			c.Set(fiber.HeaderRetryAfter, strconv.Itoa(int(math.Ceil(result.RetryAfter.Seconds()))))
			return fiber.ErrTooManyRequests
		}
		err = c.Next()
		if err == nil && c.Response().StatusCode() < 400 && !c.Context().Hijacked() {
			_, _ = limiter.Refund(c.UserContext(), result) // if the refund is lost, the request stays charged
		}
		return err
	}
}

func recipeFiber(limiter *ratelimit.Limiter) *fiber.App {
	logIn := func(c *fiber.Ctx) error {
		if c.FormValue("password") != password {
			return fiber.ErrUnauthorized
		}
		return c.SendStatus(fiber.StatusNoContent)
	}

	name := httplimit.ByFunc(func(r *http.Request) (string, error) { return r.PostFormValue("name"), nil })
	key := httplimit.HMAC(secret, httplimit.Join(httplimit.ByIP(), name))
	app := fiber.New()
	app.Post("/login", limitFiber(limiter, key), logIn)
	return app
}

// Two log-ins with each name may fail. Successful log-ins are not charged.
func TestRecipes(t *testing.T) {
	t.Parallel()

	ofHandler := func(handler http.Handler) string {
		server := httptest.NewServer(handler)
		t.Cleanup(server.Close)
		return server.URL
	}
	// fiber's shutdown waits until all connections are closed
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	gin.SetMode(gin.ReleaseMode)
	for name, url := range map[string]string{
		"chi":   ofHandler(recipeChi(limitLogIn(t))),
		"echo":  ofHandler(recipeEcho(limitLogIn(t))),
		"gin":   ofHandler(recipeGin(limitLogIn(t))),
		"fiber": serveFiber(t, recipeFiber(newLimiter(t))),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			logIn := func(name, password string) int {
				form := strings.NewReader(neturl.Values{"name": {name}, "password": {password}}.Encode())
				request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/login", form)
				require.NoError(t, err)
				request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
				return status(t, request, client.Do)
			}
			for range 3 {
				require.Less(t, logIn("ann", password), 300)
			}
			require.Equal(t, 401, logIn("ann", "wrong"))
			require.Less(t, logIn("ann", password), 300)
			require.Equal(t, 401, logIn("ann", "wrong"))
			require.Equal(t, 429, logIn("ann", "wrong"))
			require.Equal(t, 429, logIn("ann", password))
			require.Equal(t, 401, logIn("bob", "wrong"))
		})
	}
}
