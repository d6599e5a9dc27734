-- The tables and their sizes, without and with the index.
SELECT t.name, pg_relation_size(t.name::regclass), pg_total_relation_size(t.name::regclass)
FROM (VALUES ('rate_limit_ephemeral'), ('rate_limit_durable')) AS t (name)
