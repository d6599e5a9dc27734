-- This statement waits until no other session changes policies, and blocks such sessions until the transaction ends. A
-- trigger takes the lock before each statement that could change a policy, even if no row changes.
DELETE FROM rate_limit_policy WHERE false
