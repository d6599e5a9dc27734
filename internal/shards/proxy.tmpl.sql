-- This script creates the functions of a proxy. A proxy's functions have the names and arguments of a shard's
-- functions, and PL/Proxy passes each call on to the shards of its keys. PL/Proxy replaces an argument's name
-- everywhere in a statement, except after a dot.
{{define "names"}}{{range $i, $a := .}}{{if $i}}, {{end}}{{$a.Name}}{{end}}{{end}}
{{define "typed"}}{{range $i, $a := .}}{{if $i}}, {{end}}{{$a.Name}} {{$a.Type}}{{end}}{{end}}
{{define "columns"}}{{range $i, $a := .}}{{if $i}}, {{end}}d.{{$a.Name}}{{end}}{{end}}

DO $$
DECLARE
    fn regprocedure;
BEGIN
    -- Drop internal functions, and functions of another release.
    FOR fn IN
        SELECT p.oid::regprocedure FROM pg_proc AS p
        WHERE p.pronamespace = {{literal .Schema}}::regnamespace AND p.proname ~ '^_?rate_limit_'
            AND (p.proname, oidvectortypes(p.proargtypes)) NOT IN (('rate_limit_version', ''), ('rate_limit_shards', '')
            {{- range .Functions}},
                ('{{.Name}}', '{{range $i, $a := .In}}{{if $i}}, {{end}}{{$a.Type}}{{end}}'){{end}})
    LOOP
        EXECUTE format('DROP FUNCTION %s', fn);
    END LOOP;
    IF to_regtype({{literal (print .Schema ".rate_limit_decision")}}) IS NULL THEN
        CREATE TYPE {{.Schema}}.rate_limit_decision AS ({{template "typed" .Decision}});
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION {{.Schema}}.rate_limit_version()
RETURNS bigint
LANGUAGE sql
IMMUTABLE
AS $$ SELECT {{.Version}}::bigint $$;

-- rate_limit_shards returns the number of shards.
CREATE OR REPLACE FUNCTION {{.Schema}}.rate_limit_shards()
RETURNS integer
LANGUAGE sql
IMMUTABLE
AS $$ SELECT {{.Shards}} $$;

{{template "hash" .}}
-- _rate_limit_shard_of_all returns the shard of a call's keys. _rate_limit_shard_of_all returns NULL if there are
-- several, or raises an error if the caller would call again, because an error must mean that nothing was taken. If
-- there are no valid keys, the first shard explains the error.
CREATE OR REPLACE FUNCTION {{.Schema}}._rate_limit_shard_of_all(keys text[], again boolean)
RETURNS integer
LANGUAGE plpgsql
STABLE
AS $$
DECLARE
    shards CONSTANT integer := {{.Schema}}.rate_limit_shards();
    shard CONSTANT integer := coalesce({{.Schema}}._rate_limit_shard(keys[1], shards), 0);
BEGIN
    IF array_ndims(keys) = 1 AND array_lower(keys, 1) = 1 AND array_position(keys, NULL) IS NULL
        AND shard <> ANY (ARRAY(SELECT {{.Schema}}._rate_limit_shard(k, shards) FROM unnest(keys) AS k))
    THEN
        IF again THEN
            RAISE EXCEPTION 'rate_limit: the keys are on several of % shards', shards
                USING ERRCODE = 'RLS01', DETAIL = shards::text,
                    HINT = 'With lock_timeout_ms or skip_held, or by rate_limit_take_, '
                        'ask for the keys of one shard at a time.';
        END IF;
        RETURN NULL;
    END IF;
    RETURN shard;
END
$$;

-- _rate_limit_shard_of_hold returns the shard of the keys of a hold. _rate_limit_hold_id has put it into the id. If the
-- text is not that of a hold, the result is NULL. If the version of the id is 8, the keys may be on several shards.
CREATE OR REPLACE FUNCTION {{.Schema}}._rate_limit_shard_of_hold(hold text, shards integer)
RETURNS integer
LANGUAGE plpgsql
IMMUTABLE
AS $$
BEGIN
    IF hold COLLATE "C" ~ '^[0-9a-f-]{14}8' THEN
        RAISE EXCEPTION 'rate_limit: the keys of this hold share no part in braces, and may be on several shards'
            USING ERRCODE = 'RLS04', DETAIL = shards::text, HINT = 'Settle the hold in the process that made it, or '
                'let it end. Hold keys with the same part in braces, such as {user:1}:minute and {user:1}:day.';
    END IF;
    RETURN ('x' || substring(hold COLLATE "C", '^[0-9a-f-]{32}([0-9a-f]{4})[.]'))::bit(16)::integer & (shards - 1);
END
$$;

CREATE OR REPLACE FUNCTION {{.Schema}}._rate_limit_no_transaction()
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION 'rate_limit: a proxy of shards cannot decide in a transaction of the caller'
        USING ERRCODE = 'RLS02', HINT = 'What is taken on a shard stays taken when this transaction is rolled back. '
            'Ask outside of it, or in the database of the shard itself.';
END
$$;

CREATE OR REPLACE FUNCTION {{.Schema}}._rate_limit_check_sets(requests integer[], keys text[], shards integer)
RETURNS void
LANGUAGE plpgsql
STABLE
AS $$
DECLARE
    request integer;
BEGIN
    SELECT u.request INTO request
    FROM unnest(requests, keys) AS u (request, key)
    GROUP BY u.request
    HAVING count(DISTINCT {{.Schema}}._rate_limit_shard(u.key, shards)) > 1
    ORDER BY u.request LIMIT 1;
    IF found THEN
        RAISE EXCEPTION 'rate_limit: the keys of request % are on several shards', request
            USING ERRCODE = 'RLS04', DETAIL = shards::text,
                HINT = 'Keys with the same part in braces are on one shard, such as {user:1}:minute and {user:1}:day.';
    END IF;
END
$$;
{{range .Functions}}
CREATE OR REPLACE FUNCTION {{$.Schema}}._{{.Name}}(
    shard integer, shards integer, {{template "typed" .In}}{{range .Out}}, OUT {{.Name}} {{.Type}}{{end}}
)
{{if .ByKeys}}RETURNS text
{{else if not .Out}}RETURNS {{.Result}}
{{else if .Set}}RETURNS SETOF record
{{end}}LANGUAGE plproxy
AS $$
    CLUSTER 'rate_limit_shards';
    RUN ON shard;
{{- if .ByKeys}}
    SELECT {{$.Schema}}._{{.Name}}(shard, shards, {{template "names" .In}});
{{- else}}
    SELECT {{if .Out}}{{template "columns" .Out}}{{else}}d{{end}}
    FROM {{$.Schema}}.{{.Name}}({{template "names" .In}}) AS d
    WHERE (SELECT {{$.Schema}}._rate_limit_own_shard(shard, shards));
{{- end}}
$$;

CREATE OR REPLACE FUNCTION {{$.Schema}}.{{.Name}}(
    {{.Arguments}}
)
{{if not .Out}}RETURNS {{.Result}}
{{else if .Set}}RETURNS SETOF record
{{end}}LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET datestyle = 'ISO, MDY' -- PL/Proxy passes times on as text, which the shard reads by its settings
SET intervalstyle = 'postgres'
SET array_nulls = on -- PL/Proxy also passes on arrays as text, and they may contain NULL
SET client_min_messages = error -- PL/Proxy warns when it opens a connection again
AS $$
#variable_conflict use_variable
DECLARE
    shards CONSTANT integer := {{$.Schema}}.rate_limit_shards();
    shard integer := {{if .ByKey}}coalesce({{$.Schema}}._rate_limit_shard(key, shards), 0)
        {{- else if .ByHold}}coalesce({{$.Schema}}._rate_limit_shard_of_hold(hold, shards), 0)
        {{- else if .BySlot}}coalesce({{$.Schema}}._rate_limit_shard_of_hold(concat(slot, '.'), shards), 0){{else}}0{{end}};
{{- if .ByKeys}}
    places bigint[];
    decisions {{$.Schema}}.rate_limit_decision[];
{{- else if .Sweeps}}
    one record;
    failed text;
    code text;
{{- end}}
BEGIN
{{- if .Policy}}
    IF policy IS NULL THEN -- only the first shard has a table of policies
        RAISE EXCEPTION 'rate_limit: no policy is given, and a proxy of shards looks for none'
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'policy',
                HINT = 'Pass a policy, such as ''sliding 10/1m''.';
    END IF;
{{- end}}
{{- if .Transacts}}
    IF lock_timeout_ms = -1 THEN
        PERFORM {{$.Schema}}._rate_limit_no_transaction();
    END IF;
{{- end}}
{{- if .Together}}
    shard := {{$.Schema}}._rate_limit_shard_of_all(keys, true);
{{- end}}
{{- if .ByKeys}}
    IF true
{{- range .PerKey}}{{if ne .Name "keys"}}
        AND coalesce(cardinality({{.Name}}) = cardinality(keys), true)
{{- end}}{{end}}
    THEN
        shard := {{$.Schema}}._rate_limit_shard_of_all(keys, lock_timeout_ms IS NOT NULL OR skip_held);
    END IF;
    IF shard IS NULL THEN
{{- range .PerKey}}{{if ne .Name "keys"}}
        IF array_ndims({{.Name}}) > 1 OR array_lower({{.Name}}, 1) <> 1 THEN
            RAISE EXCEPTION 'rate_limit: {{.Name}} must have one dimension, and begin at 1'
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
{{- end}}{{end}}
{{- if .Sets}}
        PERFORM {{$.Schema}}._rate_limit_check_sets(requests, keys, shards);
{{- end}}
        FOR shard, places IN
            SELECT e.shard, array_agg(e.place ORDER BY e.place)
            FROM (SELECT {{$.Schema}}._rate_limit_shard(k, shards), i FROM unnest(keys) WITH ORDINALITY AS u (k, i))
                AS e (shard, place)
            GROUP BY e.shard
            ORDER BY e.shard
        LOOP
            decisions := decisions || ARRAY(
                SELECT ROW(places[d.ord]{{range $i, $c := $.Decision}}{{if $i}}, d.{{$c.Name}}{{end}}{{end}})
                    ::{{$.Schema}}.rate_limit_decision
                FROM unnest({{$.Schema}}._{{.Name}}(shard, shards{{range .In}},
                    {{if .PerKey}}CASE WHEN {{.Name}} IS NOT NULL THEN
                        ARRAY(SELECT {{.Name}}[u.p] FROM unnest(places) WITH ORDINALITY AS u (p, i) ORDER BY u.i) END
                    {{- else}}{{.Name}}{{end}}{{end}})::{{$.Schema}}.rate_limit_decision[]) AS d);
        END LOOP;
        RETURN QUERY SELECT * FROM unnest(decisions) AS d ORDER BY d.ord;
        RETURN;
    END IF;
{{- end}}
{{- if .ByKeys}}
    RETURN QUERY SELECT * FROM unnest({{$.Schema}}._{{.Name}}(shard, shards, {{template "names" .In}})
        ::{{$.Schema}}.rate_limit_decision[]);
{{- else if .Sweeps}}
    -- After a pass has ended on a shard, no new pass begins there while the other shards continue.
    at_most_every := CASE WHEN sweeper IS NULL THEN at_most_every ELSE coalesce(at_most_every, interval '1 minute') END;
    skipped := true;
    complete := true;
    scanned := 0;
    deleted := 0;
    page := 0;
    pages := 0;
    WHILE shard < shards LOOP
        BEGIN
            SELECT {{template "columns" .Out}} INTO STRICT one
            FROM {{$.Schema}}._{{.Name}}(shard, shards, {{template "names" .In}}) AS d;
            skipped := skipped AND one.skipped;
            complete := complete AND (one.complete OR one.skipped);
            scanned := scanned + coalesce(one.scanned, 0);
            deleted := deleted + coalesce(one.deleted, 0);
            page := page + coalesce(one.page, 0);
            pages := pages + coalesce(one.pages, 0);
        EXCEPTION WHEN OTHERS THEN
            failed := coalesce(failed || '; ', '') || sqlerrm;
            code := coalesce(code, sqlstate);
        END;
        shard := shard + 1;
    END LOOP;
    IF failed IS NOT NULL THEN
        RAISE EXCEPTION 'rate_limit: the other shards were swept: %', failed USING ERRCODE = code;
    END IF;
    complete := complete AND NOT skipped;
{{- else if .BySlots}}
    -- If a shard fails, the slots of earlier shards stay renewed. The caller asks again.
    FOR shard IN
        SELECT DISTINCT {{$.Schema}}._rate_limit_shard_of_hold(concat(u.id, '.'), shards) AS place
        FROM unnest(slots) AS u (id)
        WHERE u.id IS NOT NULL
        ORDER BY place
    LOOP
        RETURN QUERY SELECT * FROM {{$.Schema}}._{{.Name}}(shard, shards{{range .In}},
            {{if .PerKey}}ARRAY(SELECT u.element FROM unnest(slots, {{.Name}}) AS u (id, element)
                WHERE {{$.Schema}}._rate_limit_shard_of_hold(concat(u.id, '.'), shards) = shard)
            {{- else}}{{.Name}}{{end}}{{end}});
    END LOOP;
{{- else if .Set}}
    RETURN QUERY SELECT * FROM {{$.Schema}}._{{.Name}}(shard, shards, {{template "names" .In}});
{{- else if .Out}}
    SELECT {{template "columns" .Out}} INTO {{template "names" .Out}}
    FROM {{$.Schema}}._{{.Name}}(shard, shards, {{template "names" .In}}) AS d;
{{- else if eq .Result "void"}}
    PERFORM {{$.Schema}}._{{.Name}}(shard, shards, {{template "names" .In}});
{{- else}}
    RETURN {{$.Schema}}._{{.Name}}(shard, shards, {{template "names" .In}});
{{- end}}
END
$$;
{{end}}

-- Grant rights. The functions run with the rights of their owner, who has the user mapping.
DO $$
DECLARE
    of CONSTANT name := {{literal .Owner}};
    fn regprocedure;
    role text;
BEGIN
    FOR fn IN
        SELECT p.oid::regprocedure FROM pg_proc AS p
        WHERE p.pronamespace = {{literal .Schema}}::regnamespace AND p.proname ~ '^_?rate_limit_'
    LOOP
        EXECUTE format('ALTER FUNCTION %s OWNER TO %I', fn, of);
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', fn);
    END LOOP;
    GRANT EXECUTE ON FUNCTION {{.Schema}}.rate_limit_version(), {{.Schema}}.rate_limit_shards() TO PUBLIC;
    IF to_regrole('rate_limit_app') IS NOT NULL THEN
        GRANT EXECUTE ON FUNCTION {{.Schema}}.rate_limit_version()
            {{- range .Functions}}{{if not .Sweeps}}, {{$.Schema}}.{{.Name}}{{end}}{{end}} TO rate_limit_app;
    END IF;
    IF to_regrole('rate_limit_sweeper') IS NOT NULL THEN
        GRANT EXECUTE ON FUNCTION {{.Schema}}.rate_limit_sweep TO rate_limit_sweeper;
    END IF;
END
$$;
