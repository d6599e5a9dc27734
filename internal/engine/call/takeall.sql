SELECT rate_limit_take_all(
    $1::pg_catalog.text[], $2::pg_catalog.text[], $3::boolean, $4::smallint[], $5::bigint[], $6::bigint[], $7::bigint[],
    $8::pg_catalog.text[], $9::bigint[], $10::integer[], $11::integer[], $12::bigint[], $13::bigint[],
    $14::integer, $15::boolean, $16::bigint)
