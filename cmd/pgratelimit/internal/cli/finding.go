package cli

import "fmt"

// Level says how bad a finding is.
type Level string

const (
	Fine    Level = "ok"
	Warning Level = "warning"
	Problem Level = "problem"
)

// Finding is what a check has found.
type Finding struct {
	Check   string `json:"check"`
	Level   Level  `json:"level"`
	Found   string `json:"found"`
	Do      string `json:"do,omitempty"` // what to do about it; statements and command lines stand between backquotes
	Anybody bool   // somebody else than the owner of the tables has to do it
}

func OK(found string, args ...any) Finding {
	return Finding{Level: Fine, Found: fmt.Sprintf(found, args...)}
}

func (l Level) Finding(do, found string, args ...any) Finding {
	return Finding{Level: l, Found: fmt.Sprintf(found, args...), Do: do}
}
