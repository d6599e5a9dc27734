SELECT rate_limit_take_calendar_window(
    $1::pg_catalog.text, $2::pg_catalog.text[], $10::bigint, $11::bigint, $12::pg_catalog.text,
    $3::bigint[], $4::bigint[], $5::boolean, $6::integer, $7::boolean, $8::bigint, $9::boolean)
