//go:build unix

package pgserver

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"syscall"
)

// account is the user that the server runs as. nil is the current user.
type account struct {
	name string
	uid  uint32
	gid  uint32
}

// serverAccount returns an unprivileged account if the current user is root, because Postgres refuses to run as
// root.
func serverAccount() (*account, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}

	for _, name := range []string{"postgres", "_postgres", "nobody"} {
		found, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.ParseUint(found.Uid, 10, 32)
		gid, gidErr := strconv.ParseUint(found.Gid, 10, 32)
		if err := errors.Join(uidErr, gidErr); err != nil {
			return nil, fmt.Errorf("pgserver: ids of user %s: %w", name, err)
		}
		return &account{name: name, uid: uint32(uid), gid: uint32(gid)}, nil
	}
	return nil, errors.New("pgserver: Postgres does not run as root, " +
		"and there is no user postgres or nobody to run it as: start this program as another user")
}

// own gives a file to the account.
func (a *account) own(path string) error {
	if a == nil {
		return nil
	}
	return os.Chown(path, int(a.uid), int(a.gid))
}

// checkAccess returns a readable error if the account cannot use the folder or the programs. Without it the same
// fault shows as an error of initdb, or as "permission denied" from fork.
func (a *account) checkAccess(dir, binDir string) error {
	if a == nil {
		return nil
	}

	can := func(test, path string) (bool, error) {
		cmd := exec.Command("/bin/sh", "-c", `test "$1" "$2"`, "sh", test, path)
		cmd.Dir = "/"
		cmd.SysProcAttr = detached(a)
		err := cmd.Run()
		if _, ok := errors.AsType[*exec.ExitError](err); ok {
			return false, nil
		}
		return err == nil, err
	}

	if ok, err := can("-w", dir); err != nil {
		return fmt.Errorf("pgserver: run a program as user %s, since Postgres does not run as root: %w", a.name, err)
	} else if !ok {
		return fmt.Errorf("pgserver: user %s, as whom the server runs since Postgres does not run as root, "+
			"has no access to %s: set TMPDIR to a folder that every user may enter", a.name, dir)
	}
	if ok, err := can("-x", binDir+"/postgres"); err != nil || !ok {
		return fmt.Errorf("pgserver: user %s, as whom the server runs since Postgres does not run as root, "+
			"may not run the programs in %s", a.name, binDir)
	}
	return nil
}

// detached gives a child a session of its own, which neither Ctrl-C nor the end of the terminal reaches, and an
// account.
func detached(account *account) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setsid: true}
	if account != nil {
		attr.Credential = &syscall.Credential{Uid: account.uid, Gid: account.gid} // and no further groups
	}
	return attr
}
