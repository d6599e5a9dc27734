SELECT made
FROM rate_limit_ban($1::pg_catalog.text, $2::pg_catalog.text,
    $3::pg_catalog.interval, $4::pg_catalog.interval, $5::pg_catalog.interval, $6::pg_catalog.text, $7::integer)
