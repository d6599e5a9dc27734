package envoy_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/service/internal/envoy"
)

type recording struct {
	modelRequest
	modelAnswer
}

// recordings returns what the reference answered to requests that began on an empty Redis.
func recordings(t testing.TB) (all []recording) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join("testdata", "recorded.json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(content, &all))
	require.Len(t, all, 840)
	return all
}

// The model of the reference gives all recorded answers. So it is worth comparing with.
func TestModelAnswersAsTheReferenceDid(t *testing.T) {
	t.Parallel()
	m := newModel(t, filesIn(t, "configs"))
	m.reference = true
	for i, r := range recordings(t) {
		require.Equal(t, r.modelAnswer, m.answer(r.modelRequest), "%d: %+v", i, r.modelRequest)
	}
}

// The limits, the resets and the errors are those that the reference has recorded. The codes and what remains are, too,
// until a denied request has made a difference: the reference counted it, and this server did not. Otherwise they are
// those of the model with our rule.
func TestRecordedAnswers(t *testing.T) {
	t.Parallel()
	files := filesIn(t, "configs")
	reference, ours := newModel(t, files), newModel(t, files)
	reference.reference = true
	at := &clock{}
	server := newServer(t, pgtest.New(t).NewPool(t, nil), at, load(t, files), envoy.Options{})
	var same, other, codes int
	for i, r := range recordings(t) {
		at.now = time.Unix(r.Unix, 500_000_000)
		equal := countsEqual(reference, ours, r.modelRequest)
		got := ask(t.Context(), t, server, r.modelRequest)
		require.Equal(t, ours.answer(r.modelRequest), got, "%d: %+v", i, r.modelRequest)
		require.Equal(t, r.Error, got.Error)
		require.Len(t, got.Statuses, len(r.Statuses))
		reference.answer(r.modelRequest)
		for j, s := range got.Statuses {
			want := r.Statuses[j]
			require.Equal(t, want.Limit, s.Limit, "%d.%d", i, j)
			require.Equal(t, want.Reset, s.Reset, "%d.%d", i, j)
			if want.Code != s.Code {
				codes++
			}
			switch {
			case !equal:
				other++
			case r.Overall == "OVER_LIMIT": // this request takes nothing here
				require.Equal(t, want.Code, s.Code, "%d.%d", i, j)
				other++
			default:
				require.Equal(t, want, s, "%d.%d", i, j)
				same++
			}
		}
		if equal {
			require.Equal(t, r.Overall, got.Overall, "%d", i)
		}
	}
	t.Logf("%d statuses are equal; for %d, a denied request makes a difference, and %d of these have another code",
		same, other, codes)
	require.Greater(t, same, 300)
	require.Greater(t, other, 100)
}

// countsEqual tells whether both models count the same for all keys of a request.
func countsEqual(a, b *model, q modelRequest) bool {
	for _, d := range q.Descriptors {
		if ask := a.ask(q, d); ask != nil && a.counts[ask.key] != b.counts[ask.key] {
			return false
		}
	}
	return true
}
