SELECT name, key, durable,
    (pg_catalog.date_part('epoch', ends_at) OPERATOR(pg_catalog.*) 1000000::double precision)::bigint
FROM rate_limit_find_hold($1::pg_catalog.text, $2::pg_catalog.timestamptz)
