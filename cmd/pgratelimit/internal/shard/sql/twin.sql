-- Takes the lock of its own place until the end of the transaction. While that is open, only those who ask in the same
-- database cannot share it. So this returns the first place whose database is this one too; NULL if there is none.
--   $1  a random number for all of these transactions
--   $2  the place of this one
SELECT min(place)
FROM generate_series(0, $2::integer) AS place
WHERE NOT CASE
    WHEN place = $2::integer THEN pg_try_advisory_xact_lock($1::integer, place)
    ELSE pg_try_advisory_xact_lock_shared($1::integer, place)
END
