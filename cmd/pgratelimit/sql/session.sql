-- Settings of one transaction.
--   $1  longest time for a statement, in milliseconds
--   $2  schema of the tables and functions; '' leaves search_path
SELECT
    set_config('statement_timeout', $1::bigint::text, true),
    CASE WHEN $2::text <> '' THEN set_config('search_path', quote_ident($2::text), true) END
