package cli

import (
	"runtime/debug"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestVersion(t *testing.T) {
	t.Parallel()

	const commit = "aa9556098043e8ccafcb13dbfa7f53e1b688964b"
	for _, test := range []struct{ version, commit, changed, want string }{
		{"v0.1.0", "", "", "v0.1.0"}, // go install …@v0.1.0
		{"v0.0.0-20261128214855-aa9556098043", "", "", "v0.0.0-20261128214855-aa9556098043"}, // go install …@aa955609
		{"v0.1.0", commit, "false", "v0.1.0"},                                                // from a checkout at the tag
		{"v0.1.0+dirty", commit, "true", "devel aa9556098043 with changes"},
		{"v0.1.1-0.20261128214855-aa9556098043", commit, "false", "devel aa9556098043"},
		{"v0.1.1-0.20261128214855-aa9556098043+dirty", commit, "true", "devel aa9556098043 with changes"},
		{"(devel)", commit, "false", "devel aa9556098043"},
		{"(devel)", "", "", "devel"}, // without git
		{"", "", "", "devel"},
	} {
		info := &debug.BuildInfo{Main: debug.Module{Version: test.version}}
		if test.commit != "" {
			info.Settings = []debug.BuildSetting{
				{Key: "vcs", Value: "git"},
				{Key: "vcs.revision", Value: test.commit},
				{Key: "vcs.modified", Value: test.changed},
			}
		}
		require.Equal(t, test.want, versionOf(info), "%+v", test)
	}
	require.Contains(t, Version(), devel, "a test is no release")
}

func TestSessionsHaveNames(t *testing.T) {
	t.Parallel()

	for given, want := range map[string]string{
		"":                                     "pgratelimit",
		"host=localhost":                       "pgratelimit",
		"host=localhost application_name=cron": "cron",
	} {
		config, err := pgx.ParseConfig(given)
		require.NoError(t, err)
		NameSession(config, "pgratelimit")
		require.Equal(t, want, config.RuntimeParams["application_name"], given)
	}
	config, err := pgx.ParseConfig("")
	require.NoError(t, err)
	nameSession(config, "pgratelimit serve", "v0.1.0")
	require.Equal(t, "pgratelimit serve v0.1.0", config.RuntimeParams["application_name"])
}
