//go:build unix

package pgserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// programs runs a server from programs on this machine. The server's files are all in its folder.
//
// The postmaster is a child of this process, and pg_ctl is not used. With pg_ctl, the postmaster would be an orphan,
// and a killed orphan stays a zombie until init reaps it. In some containers, init never reaps orphans, and Postgres
// does not start beside a zombie.
type programs struct {
	binDir string
	from   string // a description of where the programs come from
}

// installFolders returns the folders where packages usually install the programs. Most of these folders are not in
// PATH.
func installFolders() []string {
	return []string{
		"/usr/lib/postgresql/*/bin",         // Debian, Ubuntu
		"/usr/pgsql-*/bin",                  // Red Hat and relatives, with packages of postgresql.org
		"/usr/libexec/postgresql*",          // Alpine
		"/usr/lib/postgresql*/bin",          // SUSE
		"/usr/local/pgsql/bin",              // built from source
		"/opt/homebrew/opt/postgresql*/bin", // Homebrew
		"/usr/local/opt/postgresql*/bin",    // Homebrew on Intel
		"/home/linuxbrew/.linuxbrew/opt/postgresql*/bin",
		"/opt/local/lib/postgresql*/bin", // MacPorts
		"/Applications/Postgres.app/Contents/Versions/*/bin",
		"/Library/PostgreSQL/*/bin", // EDB installer
	}
}

// findInstalled looks for the server's programs in PATH. If PATH has none, findInstalled chooses the newest version in
// folders. If major is "", any version from 14 on is accepted.
func findInstalled(ctx context.Context, major string, folders []string) (way, error) {
	var candidates []string
	if initdb, err := exec.LookPath("initdb"); err == nil {
		candidates = append(candidates, filepath.Dir(initdb))
	}
	for _, pattern := range folders {
		found, _ := filepath.Glob(pattern)
		slices.Reverse(found)
		candidates = append(candidates, found...)
	}
	for _, binDir := range candidates {
		version, err := versionOf(ctx, binDir)
		if err == nil && (strconv.Itoa(version) == major || major == "" && version >= 14) {
			return programs{binDir, binDir}, nil
		}
	}
	return nil, fmt.Errorf("no programs postgres and initdb of version %s in PATH and %s",
		cmp.Or(major, "14 or later"), strings.Join(folders, ", "))
}

// versionOf returns the major version of the programs in a folder. versionOf returns an error if the programs do not
// run.
func versionOf(ctx context.Context, binDir string) (major int, err error) {
	for _, name := range []string{"initdb", "postgres"} {
		output, err := exec.CommandContext(ctx, filepath.Join(binDir, name), "--version").CombinedOutput()
		if err != nil {
			return 0, fmt.Errorf("%s does not run on this machine: %w: %s", name, err, output)
		}
		if _, err := fmt.Sscanf(string(output), name+" (PostgreSQL) %d", &major); err != nil {
			return 0, fmt.Errorf("the version of %s: %w", name, err)
		}
	}
	return major, nil
}

func (w programs) origin() string { return w.from }

// prepare creates the data directory.
func (w programs) prepare(ctx context.Context, p *process) error {
	user, credential, err := otherUser()
	hint := ""
	if credential != nil {
		p.credential = credential
		hint = " (Postgres does not run as root, so it runs as user " + user +
			": that user must be able to enter TMPDIR, and to run " + w.binDir + ")"
		err = os.Chown(p.dir, int(credential.Uid), int(credential.Gid))
	}
	if err != nil {
		return fmt.Errorf("pgserver: %w", err)
	}

	p.dataDir = filepath.Join(p.dir, "data")
	initdb, err := p.spawn(w.command("initdb", "-D", p.dataDir, "-U", "postgres",
		"--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"))
	if err != nil {
		return fmt.Errorf("%w%s", err, hint)
	}
	select {
	case <-initdb.done:
	case <-ctx.Done():
		return fmt.Errorf("pgserver: initdb: %w", context.Cause(ctx))
	}
	if !initdb.cmd.ProcessState.Success() {
		return fmt.Errorf("pgserver: initdb: %s%s\n%s", initdb.cmd.ProcessState, hint, p.log())
	}

	settings := map[string]string{
		"listen_addresses":        "127.0.0.1",
		"unix_socket_directories": "",
		// With mmap, shared memory is in the data directory, and is removed with it. The default is a file in /dev/shm,
		// which would remain after kill -9.
		"dynamic_shared_memory_type": "mmap",
		"logging_collector":          "off",
		"log_destination":            "stderr",
	}
	maps.Copy(settings, p.config.settings())
	var lines strings.Builder
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		value := strings.NewReplacer(`'`, `''`, `\`, `\\`).Replace(settings[name])
		fmt.Fprintf(&lines, "%s = '%s'\n", name, value)
	}
	// ALTER SYSTEM can change settings in postgresql.conf, and not settings on the command line.
	file, err := os.OpenFile(filepath.Join(p.dataDir, "postgresql.conf"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return fmt.Errorf("pgserver: %w", err)
	}
	_, err = file.WriteString(lines.String())
	return errors.Join(err, file.Close())
}

func (w programs) server(p *process) *exec.Cmd {
	cmd := w.command("postgres", "-D", p.dataDir, "-p", strconv.Itoa(p.port))
	cmd.Env = append(cmd.Env, p.config.Env...)
	return cmd
}

// command returns a command without this process's environment, which may have a locale and variables of Postgres.
func (w programs) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(w.binDir, name), args...)
	cmd.Dir = "/" // the server's user may not be allowed to enter this process's working directory
	cmd.Env = []string{"LC_ALL=C", "PATH=" + os.Getenv("PATH")}
	return cmd
}

// signal sends SIGINT, SIGTERM and SIGQUIT only to the postmaster. signal sends other signals to the postmaster's
// children too.
func (w programs) signal(p *process, signal syscall.Signal) error {
	postmaster := p.pid()
	pids := []int{postmaster}
	switch signal {
	case syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT:
	default:
		// A suspended postmaster does not reap its children, so their process ids cannot be reused.
		if err := syscall.Kill(postmaster, syscall.SIGSTOP); err != nil {
			return err
		}
		children, err := childrenOf(postmaster)
		if err != nil {
			return err
		}
		pids = append(children, postmaster)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
			return err
		}
	}
	return nil
}

// childrenOf returns the ids of a process's children. All processes of a server are children of the postmaster.
func childrenOf(pid int) (children []int, err error) {
	output, err := exec.Command("pgrep", "-P", strconv.Itoa(pid)).Output()
	if _, none := errors.AsType[*exec.ExitError](err); err != nil && !none {
		return nil, fmt.Errorf("pgserver: list the processes of the server (Debian: install procps): %w", err)
	}
	for field := range strings.FieldsSeq(string(output)) {
		child, err := strconv.Atoi(field)
		if err != nil {
			return nil, err
		}
		children = append(children, child)
	}
	return children, nil
}

// otherUser returns a user for the server if this process runs as root, because Postgres refuses to run as root.
func otherUser() (name string, credential *syscall.Credential, err error) {
	if os.Geteuid() != 0 {
		return "", nil, nil
	}
	for _, name := range []string{"postgres", "_postgres", "nobody"} {
		if account, err := user.Lookup(name); err == nil {
			uid, _ := strconv.ParseUint(account.Uid, 10, 32)
			gid, _ := strconv.ParseUint(account.Gid, 10, 32)
			return name, &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
		}
	}
	return "", nil, errors.New("there is no user postgres or nobody to run Postgres as, " +
		"which does not run as root: start this program as another user")
}
