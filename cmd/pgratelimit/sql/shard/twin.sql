-- Takes locks until the end of the transaction. Two transactions that are open at the same time can have the same lock
-- only in different databases. So it returns the first place whose database is this one too; NULL if there is none.
--   $1  a random number for all of these transactions
--   $2  the place of this one
SELECT min(place)
FROM generate_series(0, $2::integer) AS place
WHERE NOT pg_try_advisory_xact_lock($1::integer, place)
