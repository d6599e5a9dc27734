SELECT rate_limit_report(
    $1::bigint[], $2::bigint[], $3::pg_catalog.text[], $4::bigint[], $5::bigint[], $6::bigint[])
