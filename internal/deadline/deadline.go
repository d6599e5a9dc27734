// Package deadline has the default timeout of a client's calls.
package deadline

import "time"

// Default is how long a call may take if the client's configuration has no timeout. Tests set a longer timeout, because
// a busy machine may pause for more than a second.
//
//nolint:gochecknoglobals // set by nothing but TestMain, before the first client is made
var Default = time.Second
