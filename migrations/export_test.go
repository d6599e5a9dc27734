package migrations

// LockID is the advisory lock, for tests that hold it themselves.
const LockID = lockID
