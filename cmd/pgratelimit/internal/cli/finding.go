package cli

import "fmt"

// Level is the severity of a finding.
type Level string

const (
	Fine    Level = "ok"
	Warning Level = "warning"
	Problem Level = "problem"
)

// Finding is the result of one of doctor's checks.
type Finding struct {
	Check   string `json:"check"`
	Level   Level  `json:"level"`
	Found   string `json:"found"`
	Do      string `json:"do,omitempty"` // the advice, with statements and command lines in backquotes
	Anybody bool   // whether a role other than the tables' owner must follow the advice
}

func OK(found string, args ...any) Finding {
	return Finding{Level: Fine, Found: fmt.Sprintf(found, args...)}
}

func (l Level) Finding(do, found string, args ...any) Finding {
	return Finding{Level: l, Found: fmt.Sprintf(found, args...), Do: do}
}

// Of returns the finding with the argument check as the name of its check.
func (f Finding) Of(check string) Finding {
	f.Check = check
	return f
}

func (f Finding) ForAnybody() Finding {
	f.Anybody = true
	return f
}
