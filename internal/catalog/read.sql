-- This query describes the limiter's objects in a schema, except for their rights and comments. The result has a row
-- for each aspect of an object. The values do not have the schema's name. A function's body has {schema} in its place.
--   $1  the name of the schema
--   $2  the names of the limiter's tables, types and functions
WITH schema AS (
    SELECT n.oid, quote_ident(n.nspname) || '.' AS prefix
    FROM pg_namespace AS n
    WHERE n.nspname = $1::text
),
relation AS (
    SELECT c.*, s.prefix,
        concat(CASE c.relkind WHEN 'r' THEN 'table ' WHEN 'c' THEN 'type ' WHEN 'v' THEN 'view ' ELSE 'relation ' END,
            c.relname) AS object
    FROM pg_class AS c
    JOIN schema AS s ON s.oid = c.relnamespace
    WHERE c.relname = ANY ($2::text[])
),
attribute AS (
    SELECT a.*, r.object, r.relowner, r.prefix, d.adbin, t.typtype
    FROM relation AS r
    JOIN pg_attribute AS a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped
    JOIN pg_type AS t ON t.oid = a.atttypid
    LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
),
function AS (
    SELECT p.*, s.prefix, concat('function ', p.proname, '(',
            replace(oidvectortypes(p.proargtypes), s.prefix, ''), ')') AS object
    FROM pg_proc AS p
    JOIN schema AS s ON s.oid = p.pronamespace
    WHERE p.proname = ANY ($2::text[])
),
found (object, owner, aspect, value) AS (
    SELECT r.object, r.relowner, 'persistence', CASE r.relpersistence WHEN 'u' THEN 'unlogged' ELSE 'logged' END
    FROM relation AS r
    UNION ALL
    SELECT r.object, r.relowner, 'fillfactor', coalesce((
        SELECT o.option_value FROM pg_options_to_table(r.reloptions) AS o WHERE o.option_name = 'fillfactor'), 'unset')
    FROM relation AS r
    UNION ALL
    -- Row security that has no policy and is not forced does not restrict the functions' owner.
    SELECT r.object, r.relowner, 'row security',
        nullif(concat_ws(', ', CASE WHEN r.relforcerowsecurity THEN 'forced' END, (
            SELECT string_agg('policy ' || p.polname, ', ' ORDER BY p.polname)
            FROM pg_policy AS p WHERE p.polrelid = r.oid)), '')
    FROM relation AS r
    UNION ALL
    SELECT a.object, a.relowner, 'order of columns', string_agg(a.attname::text, ', ' ORDER BY a.attnum)
    FROM attribute AS a
    GROUP BY a.object, a.relowner
    UNION ALL
    SELECT a.object, a.relowner, concat('column ', a.attname), concat_ws(' ',
        CASE WHEN a.typtype = 'd' THEN 'domain' END, -- a domain can be NOT NULL
        replace(format_type(a.atttypid, a.atttypmod), a.prefix, ''),
        CASE WHEN a.attnotnull THEN 'not null' END,
        'default ' || pg_get_expr(a.adbin, a.attrelid),
        'collate ' || nullif(a.attcollation, 0)::regcollation::text,
        'generated ' || nullif(concat(a.attgenerated::text, a.attidentity::text), ''),
        'storage ' || a.attstorage::text)
    FROM attribute AS a
    UNION ALL
    SELECT r.object, r.relowner, concat('index ', x.relname), replace(concat_ws(' ', pg_get_indexdef(i.indexrelid),
        CASE WHEN NOT i.indisvalid THEN 'invalid' END), r.prefix, '')
    FROM relation AS r
    JOIN pg_index AS i ON i.indrelid = r.oid
    JOIN pg_class AS x ON x.oid = i.indexrelid
    UNION ALL
    -- From Postgres 18 on, a NOT NULL of a column is also a constraint. This query shows NOT NULL by attnotnull.
    SELECT r.object, r.relowner, concat('constraint ', c.conname), concat_ws(' ', pg_get_constraintdef(c.oid))
    FROM relation AS r
    JOIN pg_constraint AS c ON c.conrelid = r.oid
    WHERE c.contype <> 'n'
    UNION ALL
    SELECT r.object, r.relowner, concat('trigger ', t.tgname),
        replace(pg_get_triggerdef(t.oid), r.prefix, '')
    FROM relation AS r
    JOIN pg_trigger AS t ON t.tgrelid = r.oid
    JOIN pg_proc AS p ON p.oid = t.tgfoid
    -- An AFTER trigger (tgtype & 66 = 0) is allowed if its function's owner has the rights of the table's owner.
    WHERE NOT t.tgisinternal AND (t.tgtype & 66 <> 0 OR NOT pg_has_role(p.proowner, r.relowner, 'USAGE')
        OR starts_with(ltrim(p.proname, '_'), 'rate_limit_'))
    UNION ALL
    SELECT r.object, r.relowner, concat('rule ', w.rulename), w.ev_type::text
    FROM relation AS r
    JOIN pg_rewrite AS w ON w.ev_class = r.oid
    UNION ALL
    SELECT f.object, f.proowner, 'arguments', replace(pg_get_function_arguments(f.oid), f.prefix, '')
    FROM function AS f
    UNION ALL
    SELECT f.object, f.proowner, 'result', replace(pg_get_function_result(f.oid), f.prefix, '')
    FROM function AS f
    UNION ALL
    SELECT f.object, f.proowner, 'body', encode(sha256(convert_to(
        replace(replace(f.prosrc, f.prefix || 'rate_limit_', '{schema}.rate_limit_'),
            f.prefix || '_rate_limit_', '{schema}._rate_limit_'), 'UTF8')), 'hex')
    FROM function AS f
    UNION ALL
    SELECT f.object, f.proowner, 'settings', coalesce((
        SELECT string_agg(setting, ', ' ORDER BY setting COLLATE "C") FROM unnest(f.proconfig) AS setting), 'none')
    FROM function AS f
    UNION ALL
    SELECT f.object, f.proowner, 'kind', concat_ws(' ', l.lanname,
        CASE f.provolatile WHEN 'i' THEN 'immutable' WHEN 's' THEN 'stable' ELSE 'volatile' END,
        CASE WHEN f.prosecdef THEN 'security definer' ELSE 'security invoker' END,
        CASE WHEN f.proisstrict THEN 'strict' END,
        CASE WHEN f.proleakproof THEN 'leakproof' END,
        'parallel ' || f.proparallel::text, 'cost ' || f.procost, 'rows ' || f.prorows, 'kind ' || f.prokind::text)
    FROM function AS f
    JOIN pg_language AS l ON l.oid = f.prolang
)
SELECT object, pg_get_userbyid(owner)::text, aspect, coalesce(value, 'none')
FROM found
ORDER BY object COLLATE "C", aspect COLLATE "C"
