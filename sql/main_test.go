// Package sql_test tests the SQL in this folder. TestSQLEqualsModel compares decisions with the model. Other tests call
// the functions as people and other programs do.
package sql_test

import (
	"testing"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }
