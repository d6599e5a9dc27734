-- Waits until nobody else is changing policies, and keeps others from it until the transaction ends. A trigger takes
-- that lock before a statement changes anything, also if it then changes nothing.
DELETE FROM rate_limit_policy WHERE false
