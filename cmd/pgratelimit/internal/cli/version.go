package cli

import (
	"runtime/debug"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Version returns the version of this program, such as v0.1.0, or "devel" with the commit that it was built from.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return devel
	}
	return versionOf(info)
}

const devel = "devel"

// versionOf returns the version in the information about a build. For a commit without a tag, Go makes up a version,
// which would look as if one could install it.
func versionOf(info *debug.BuildInfo) string {
	commit, changed := "", false // these stay empty if go install got a module
	for _, setting := range info.Settings {
		switch setting.Key {
		case "vcs.revision":
			commit = setting.Value[:min(12, len(setting.Value))]
		case "vcs.modified":
			changed = setting.Value == "true"
		}
	}
	version := info.Main.Version
	switch {
	case changed:
		return devel + " " + commit + " with changes"
	case commit != "" && (version == "(devel)" || strings.Contains(version, commit)):
		return devel + " " + commit
	case version == "" || version == "(devel)":
		return devel
	}
	return version
}

// NameSession sets the application_name of a connection to the program and its version, unless the connection string
// has one. A program that is no release has no version there, so that one can search for its name.
func NameSession(config *pgx.ConnConfig, program string) { nameSession(config, program, Version()) }

func nameSession(config *pgx.ConnConfig, program, version string) {
	if config.RuntimeParams["application_name"] != "" {
		return
	}
	if !strings.HasPrefix(version, devel) {
		program += " " + version
	}
	config.RuntimeParams["application_name"] = program
}
