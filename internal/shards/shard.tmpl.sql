-- What a database has that is a shard, besides what the migrations make. It knows which keys are its own, so that two
-- proxies with different ideas of that cannot both have a key decided.
CREATE TABLE IF NOT EXISTS {{.Schema}}.rate_limit_shard (
    one      boolean PRIMARY KEY DEFAULT true,
    place    integer, -- NULL in a database that has rows of a shard, and has not taken over from it yet
    shards   integer,
    cluster  text, -- a random name, the same on all shards that belong together
    division text, -- the last one: the same on both of its sides
    CONSTRAINT rate_limit_shard_one CHECK (one),
    CONSTRAINT rate_limit_shard_place CHECK (
        num_nulls(place, shards, cluster) IN (0, 3) AND place >= 0 AND place < shards)
);

COMMENT ON TABLE {{.Schema}}.rate_limit_shard IS
    'Which of the shards this database is, from 0. Without a row it decides nothing that a proxy asks.';

-- What was deleted while the shard is divided. See Grow in grow.go.
CREATE UNLOGGED TABLE IF NOT EXISTS {{.Schema}}.rate_limit_shard_deleted (
    of     text NOT NULL, -- the table
    prefix text COLLATE "C" NOT NULL,
    key    text COLLATE "C" NOT NULL -- '': all keys
);

-- A platform may secure the rows of each new table, and grant rights on it. Then nobody who calls would see which
-- shard this is, and others would see keys.
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
        INSERT INTO {{.Schema}}.rate_limit_shard_deleted (of, prefix, key) VALUES (TG_TABLE_NAME, OLD.prefix, OLD.key);
    END IF;
    RETURN NULL;
END
$$;

REVOKE ALL ON FUNCTION {{.Schema}}._rate_limit_note_deleted() FROM PUBLIC;

DO $$
DECLARE
    fn regprocedure;
BEGIN
    -- What another release has had. Those that stay may be in use.
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

-- Raises unless this database has all keys of a shard of so many. Whoever divides the shard locks the table, so this waits
-- for that, and that for those who have asked before. It also has times written in the way that the proxy reads them,
-- because PL/Proxy passes text on. It has no search_path of its own, which would cost as much as the rest: what it calls
-- fits exactly, so pg_catalog's comes first.
CREATE OR REPLACE FUNCTION {{.Schema}}._rate_limit_own_shard(shard integer, shards integer)
RETURNS boolean
LANGUAGE plpgsql
AS $$
#variable_conflict use_variable
DECLARE
    own_place integer;
    own_shards integer;
BEGIN
    -- Otherwise this would see what the table held before it waited.
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
-- What a proxy asks. One value, because PL/Proxy prepares no statements: to plan one for rows and columns would take half
-- as long as to decide. Nor has it a search_path of its own.
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

GRANT EXECUTE ON FUNCTION {{$.Schema}}._{{.Name}} TO PUBLIC; -- it works with the rights of who calls it
{{end}}{{end}}
