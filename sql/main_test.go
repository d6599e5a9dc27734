// Package sql_test has the tests of the SQL in this folder as people and other programs call it. What it decides for the
// library is compared with the model by TestSQLEqualsModel.
package sql_test

import (
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
