// Package deadline has the time that a call may take.
package deadline

import "time"

// Default is how long a call may take if its client does not say. Tests make it longer, as a busy machine may stand
// still for more than a second.
//
//nolint:gochecknoglobals // set by nothing but TestMain, before the first client is made
var Default = time.Second
