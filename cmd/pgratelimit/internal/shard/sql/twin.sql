-- Each database of a proxy runs this query in an open transaction. The query locks the database's place until the
-- transaction ends. Locks of the same place only conflict in the same database. So the query returns the first place in
-- the same database, or NULL.
--   $1  a random number that is the same for all of these transactions
--   $2  the place of this database
SELECT min(place)
FROM generate_series(0, $2::integer) AS place
WHERE NOT CASE
    WHEN place = $2::integer THEN pg_try_advisory_xact_lock($1::integer, place)
    ELSE pg_try_advisory_xact_lock_shared($1::integer, place)
END
