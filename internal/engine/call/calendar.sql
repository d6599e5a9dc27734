SELECT rate_limit_take_calendar_window(
    $1::pg_catalog.text, $2::pg_catalog.text[], $9::bigint, $10::bigint, $11::pg_catalog.text,
    $3::bigint[], $4::bigint[], $5::boolean, $6::integer, $7::boolean, $8::bigint)
