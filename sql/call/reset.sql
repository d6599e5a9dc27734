SELECT rate_limit_reset(name, $2::text, $3::boolean, $4::integer, $5::boolean) FROM pg_catalog.unnest($1::text[]) AS name
