package pgserver

import "syscall"

// freeBytes is how much can be written into a folder by anybody; 0 if that is not known.
func freeBytes(dir string) uint64 {
	var stat syscall.Statfs_t
	if err := syscall.Statfs(dir, &stat); err != nil {
		return 0
	}
	return stat.Bavail * uint64(stat.Bsize) //nolint:gosec // a block has a size above 0
}
