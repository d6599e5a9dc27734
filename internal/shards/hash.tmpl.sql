{{define "hash"}}
-- The shard of a key: sha256 of what stands in its first braces, or else of the key. Package shardkey does the same.
CREATE OR REPLACE FUNCTION {{.Schema}}._rate_limit_shard(key text, shards integer)
RETURNS integer
LANGUAGE sql
IMMUTABLE
AS $$
    SELECT ('x' || substr(encode(sha256(convert_to(
        CASE WHEN strpos(key COLLATE "C", '{') = 0 THEN key
            ELSE coalesce(substring(key COLLATE "C", '^[^{]*[{]([^}]+)[}]'), key) END,
        'UTF8')), 'hex'), 1, 8))::bit(32)::integer & (shards - 1)
$$;
{{end}}
