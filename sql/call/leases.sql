SELECT rate_limit_report_leases($1::pg_catalog.text, $2::pg_catalog.text[], $3::pg_catalog.text[], $4::boolean[],
    $5::bigint[], $6::bigint[])
