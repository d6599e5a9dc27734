SELECT made
FROM ROWS FROM (
    pg_catalog.unnest($1::pg_catalog.text[]), pg_catalog.unnest($2::pg_catalog.text[]),
    pg_catalog.unnest($3::bigint[]), pg_catalog.unnest($4::bigint[]), pg_catalog.unnest($5::bigint[]),
    pg_catalog.unnest($6::pg_catalog.text[])
) AS ban (name, key, first, longest, forgiven_after, comment)
CROSS JOIN LATERAL rate_limit_ban(ban.name, ban.key,
    pg_catalog.make_interval(secs => ban.first OPERATOR(pg_catalog./) 1e6::double precision),
    pg_catalog.make_interval(secs => ban.longest OPERATOR(pg_catalog./) 1e6::double precision),
    pg_catalog.make_interval(secs => ban.forgiven_after OPERATOR(pg_catalog./) 1e6::double precision),
    ban.comment, $7::integer)
