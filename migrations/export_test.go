package migrations

// LockID is the advisory lock, for tests that hold it.
const LockID = lockID
