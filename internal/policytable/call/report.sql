SELECT rate_limit_report($1::bigint[], $2::pg_catalog.text[], $3::bigint[], $4::bigint[], $5::bigint[])
