package engine_test

import (
	"testing"

	"github.com/pgratelimit/ratelimit/internal/doortest"
)

func TestMain(m *testing.M) { doortest.Main(m) }
