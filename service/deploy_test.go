package service_test

import (
	"encoding/json"
	"net/http"
	"os"
	"strings"
	"testing"

	bootstrap "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	// These register the types that envoy.yaml names.
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ratelimit/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/pgratelimit/ratelimit/service"
)

// The configuration for Envoy has only fields that Envoy's types have, and values that their rules allow. An Envoy does
// not run here.
func TestEnvoyYAML(t *testing.T) {
	t.Parallel()
	content, err := os.ReadFile("../deploy/envoy.yaml")
	require.NoError(t, err)
	var tree any
	require.NoError(t, yaml.Unmarshal(content, &tree))
	asJSON, err := json.Marshal(tree)
	require.NoError(t, err)
	var parsed bootstrap.Bootstrap
	require.NoError(t, protojson.Unmarshal(asJSON, &parsed))
	require.NoError(t, parsed.ValidateAll())
	require.Len(t, parsed.GetStaticResources().GetClusters(), 1)
}

func TestExampleConfigurations(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{"../deploy/ratelimit", "../cmd/pgratelimit/internal/serve/example"} {
		require.NoError(t, service.Check(dir), dir)
	}
	require.ErrorContains(t, service.Check(t.TempDir()), "has no file")
}

// The limiters of docs/other-languages.md can be loaded, and the requests there name one of them.
func TestLimitersOfTheDocument(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/other-languages.md")
	require.NoError(t, err)
	_, after, found := strings.Cut(string(text), "```yaml\n")
	require.True(t, found)
	limiters, requests, found := strings.Cut(after, "```")
	require.True(t, found)
	s := start(t, map[string]string{"limiters.yaml": limiters}, nil)
	require.Contains(t, requests, `{"limiter": "login"`)
	require.Equal(t, http.StatusOK, s.ask(t, "login"))
}
