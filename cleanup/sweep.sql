SELECT skipped, complete, scanned, deleted, page, pages
FROM rate_limit_sweep($1::integer, $2::integer, $3::text[], $4::text, $5::interval, $6::timestamptz)
