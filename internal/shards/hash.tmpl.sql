{{define "hash"}}
-- _rate_limit_shard returns a key's shard, by a hash of the text in the first braces or of the key. See shardkey.Of.
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
