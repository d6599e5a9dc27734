SELECT rate_limit_reset($1::text, $2::text, $3::boolean, $4::integer, $5::boolean)
