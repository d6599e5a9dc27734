package main

import (
	"slices"
	"strings"
)

// function is what a migration says of a function.
type function struct {
	body    string // as in pg_proc.prosrc
	definer bool   // it runs with the rights of its owner
}

// expectedFunctions returns the functions that there are after all migrations up to a version, by name. They come from the
// migrations themselves, so there is nothing to keep up to date.
func expectedFunctions(all []migration, version int64) map[string]function {
	functions := map[string]function{}
	for _, migration := range all {
		if migration.Version > version {
			continue
		}
		sql := migration.up
		for _, statement := range []string{"CREATE FUNCTION ", "CREATE OR REPLACE FUNCTION "} {
			for _, definition := range strings.Split("\n"+sql, "\n"+statement)[1:] {
				name, _, _ := strings.Cut(definition, "(")
				head, rest, _ := strings.Cut(definition, "\nAS $")
				tag, rest, _ := strings.Cut(rest, "$")
				body, _, _ := strings.Cut(rest, "$"+tag+"$")
				functions[name] = function{body, strings.Contains(head, "\nSECURITY DEFINER")}
			}
		}
		for _, dropped := range strings.Split("\n"+sql, "\nDROP FUNCTION ")[1:] {
			name, _, _ := strings.Cut(dropped, "(")
			delete(functions, name)
		}
	}
	return functions
}

// callable returns the names of the functions that applications call: the others run only within these, but for the sweeper.
func callable(functions map[string]function) []string {
	var names []string
	for name, function := range functions {
		if function.definer && name != "rate_limit_sweep" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
