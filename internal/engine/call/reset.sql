SELECT rate_limit_reset(name, $2::pg_catalog.text, $3::boolean, $4::integer, $5::boolean)
FROM pg_catalog.unnest($1::pg_catalog.text[]) AS name
