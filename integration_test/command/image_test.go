package command

import (
	"debug/elf"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// The program built by deploy/Dockerfile works in an empty image, without any other file. The program runs as a user
// who is not in /etc/passwd.
func TestBinaryNeedsNothing(t *testing.T) {
	t.Parallel()

	binary := buildCommand(t)
	file, err := elf.Open(binary)
	require.NoError(t, err)
	defer file.Close()
	for _, program := range file.Progs {
		require.NotEqual(t, elf.PT_INTERP, program.Type, "it is linked dynamically")
	}

	db := pgtest.New(t)
	cmd := exec.CommandContext(t.Context(), binary, "sweep", "--json")
	if os.Geteuid() == 0 {
		root := testkit.OpenDir(t)
		require.NoError(t, os.Link(binary, root+"/pgratelimit"))
		cmd = exec.CommandContext(t.Context(), "/pgratelimit", "sweep", "--json")
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Credential: &syscall.Credential{Uid: 65532, Gid: 65532}}
	}
	cmd.Env = []string{"DATABASE_URL=" + db.URL}
	output, err := cmd.CombinedOutput()
	require.NoError(t, err, string(output))
	require.Contains(t, string(output), `"complete": true`)
}
