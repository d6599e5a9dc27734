// Package sql_test has the tests of the SQL in this folder. TestSQLEqualsModel compares what it decides with the model.
// Others call it as people and other programs do.
package sql_test

import (
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
