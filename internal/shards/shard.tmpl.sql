-- This script creates the tables and functions that only a shard has. A shard knows which keys it owns. So two proxies
-- that disagree about a key's shard cannot both get decisions for the key.
CREATE TABLE IF NOT EXISTS {{.Schema}}.rate_limit_shard (
    one      boolean PRIMARY KEY DEFAULT true,
    place    integer, -- NULL while a division copies rows into this database
    shards   integer,
    cluster  text, -- a random name that all shards of a cluster have
    division text, -- the mark of the last division, which the old and the new shard have
    CONSTRAINT rate_limit_shard_one CHECK (one),
    CONSTRAINT rate_limit_shard_place CHECK (
        num_nulls(place, shards, cluster) IN (0, 3) AND place >= 0 AND place < shards)
);

COMMENT ON TABLE {{.Schema}}.rate_limit_shard IS
    'Which of the shards this database is, from 0. Without a row it decides nothing that a proxy asks.';

-- The rows that were deleted during a division. See Grow in grow.go.
CREATE UNLOGGED TABLE IF NOT EXISTS {{.Schema}}.rate_limit_shard_deleted (
    of     text NOT NULL, -- the table's name
    prefix text COLLATE "C" NOT NULL,
    key    text COLLATE "C" NOT NULL, -- '' means that all rows were deleted
    id     text -- of a hold
);

-- A platform may enable row security on new tables, or grant rights on them. Undo this, because all callers must be
-- able to read rate_limit_shard, and only the owner may read keys.
DO $$
DECLARE
    undo text;
BEGIN
    FOR undo IN
        SELECT format('ALTER TABLE %s DISABLE ROW LEVEL SECURITY', c.oid::regclass)
        FROM pg_class AS c
        WHERE c.relnamespace = {{literal .Schema}}::regnamespace AND c.relrowsecurity AND c.relname = 'rate_limit_shard'
        UNION ALL
        SELECT DISTINCT format('REVOKE ALL ON TABLE %s FROM %s', c.oid::regclass,
            CASE a.grantee WHEN 0::oid THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
        FROM pg_class AS c
        CROSS JOIN aclexplode(c.relacl) AS a
        WHERE c.relnamespace = {{literal .Schema}}::regnamespace AND a.grantee <> c.relowner
            AND c.relname IN ('rate_limit_shard', 'rate_limit_shard_deleted')
    LOOP
        EXECUTE undo;
    END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION {{.Schema}}._rate_limit_note_deleted()
RETURNS trigger
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        INSERT INTO {{.Schema}}.rate_limit_shard_deleted (of, prefix, key) VALUES (TG_TABLE_NAME, '', '');
    ELSE
        INSERT INTO {{.Schema}}.rate_limit_shard_deleted (of, prefix, key, id)
        VALUES (TG_TABLE_NAME, OLD.prefix, OLD.key, to_jsonb(OLD) ->> 'id');
    END IF;
    RETURN NULL;
END
$$;

REVOKE ALL ON FUNCTION {{.Schema}}._rate_limit_note_deleted() FROM PUBLIC;

DO $$
DECLARE
    fn regprocedure;
BEGIN
    -- Drop functions of another release. Keep the functions of this release, which may be in use.
    FOR fn IN
        SELECT p.oid::regprocedure FROM pg_proc AS p
        WHERE p.pronamespace = {{literal .Schema}}::regnamespace AND p.proname LIKE '#_rate#_limit#_%' ESCAPE '#'
            AND p.proargnames[1] = 'shard'
            AND (p.proname, oidvectortypes(p.proargtypes)) NOT IN (('_rate_limit_own_shard', 'integer, integer')
            {{- range .Functions}}{{if .ByKeys}},
                ('_{{.Name}}', 'integer, integer{{range .In}}, {{.Type}}{{end}}'){{end}}{{end}})
    LOOP
        EXECUTE format('DROP FUNCTION %s', fn);
    END LOOP;
END
$$;

-- _rate_limit_own_shard raises an error if this database does not have all keys of a shard. _rate_limit_own_shard waits
-- while a division locks rate_limit_shard. _rate_limit_own_shard also sets the formats of times, because PL/Proxy
-- passes times on as text. Setting search_path would double the function's cost. pg_catalog's functions come first
-- anyway, because the argument types fit them exactly.
CREATE OR REPLACE FUNCTION {{.Schema}}._rate_limit_own_shard(shard integer, shards integer)
RETURNS boolean
LANGUAGE plpgsql
AS $$
#variable_conflict use_variable
DECLARE
    own_place integer;
    own_shards integer;
BEGIN
    -- At other isolation levels, the function could see rate_limit_shard as it was before the wait.
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'rate_limit: a shard decides in transactions that are read committed'
            USING ERRCODE = 'object_not_in_prerequisite_state',
                HINT = 'Reset default_transaction_isolation of the role as which the proxy connects.';
    END IF;
    SELECT s.place, s.shards INTO own_place, own_shards FROM {{.Schema}}.rate_limit_shard AS s;
    IF (shards % own_shards = 0 AND shard % own_shards = own_place) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: this database is %, and was asked for keys of shard % of %',
                CASE WHEN own_place IS NULL THEN 'no shard yet'
                    ELSE pg_catalog.format('shard %s of %s', own_place, own_shards) END, shard, shards
            USING ERRCODE = 'RLS03', HINT = 'Look at pgratelimit shard list.';
    END IF;
    IF current_setting('DateStyle') <> 'ISO, MDY' OR current_setting('IntervalStyle') <> 'postgres' THEN
        PERFORM set_config('DateStyle', 'ISO, MDY', true), set_config('IntervalStyle', 'postgres', true);
    END IF;
    RETURN true;
END
$$;

GRANT EXECUTE ON FUNCTION {{.Schema}}._rate_limit_own_shard(integer, integer) TO PUBLIC;
GRANT SELECT ON {{.Schema}}.rate_limit_shard TO PUBLIC;
{{template "hash" .}}
{{range .Functions}}{{if .ByKeys}}
-- Proxies call this function. The result is one value, because PL/Proxy does not prepare statements. Planning a
-- statement that returns rows would take half as long as the decision.
CREATE OR REPLACE FUNCTION {{$.Schema}}._{{.Name}}(
    shard integer, shards integer, {{template "typed" .In}}
)
RETURNS text
LANGUAGE plpgsql
AS $$
#variable_conflict use_variable
BEGIN
    PERFORM {{$.Schema}}._rate_limit_own_shard(shard, shards);
    RETURN ARRAY(SELECT d FROM {{$.Schema}}.{{.Name}}({{template "names" .In}}) AS d)::text;
END
$$;

GRANT EXECUTE ON FUNCTION {{$.Schema}}._{{.Name}} TO PUBLIC; -- the function has the rights of its caller
{{end}}{{end}}
