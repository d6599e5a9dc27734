-- Locks its own place until the end of the transaction. While the transaction is open, only sessions in the same
-- database conflict with this lock. So this returns the first place with the same database; NULL if there is none.
--   $1  a random number for all of these transactions
--   $2  the place of this one
SELECT min(place)
FROM generate_series(0, $2::integer) AS place
WHERE NOT CASE
    WHEN place = $2::integer THEN pg_try_advisory_xact_lock($1::integer, place)
    ELSE pg_try_advisory_xact_lock_shared($1::integer, place)
END
