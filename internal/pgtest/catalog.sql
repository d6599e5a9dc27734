-- This query describes all objects of a schema except goose's version table. Each row is an aspect of an object.
--
--   $1   name of the schema
WITH
schema AS (
    SELECT oid
    FROM pg_namespace
    WHERE nspname = $1
),
relation AS (
    SELECT c.*
    FROM pg_class AS c
    JOIN schema AS s ON s.oid = c.relnamespace
    WHERE c.relname NOT LIKE 'rate\_limit\_goose\_version%'
),
function AS (
    SELECT p.*
    FROM pg_proc AS p
    JOIN schema AS s ON s.oid = p.pronamespace
),
catalog (object, aspect, value) AS (
    SELECT oid::regclass::text, 'relation', concat_ws(' ', relkind, relpersistence, relreplident,
        'owner', pg_get_userbyid(relowner), 'am', relam, 'tablespace', reltablespace,
        'rls', relrowsecurity, relforcerowsecurity, 'partition', relispartition, relhassubclass)
    FROM relation
    UNION ALL
    SELECT oid::regclass::text, 'reloptions', reloptions::text FROM relation
    UNION ALL
    SELECT r.oid::regclass::text, 'toast reloptions', t.reloptions::text
    FROM relation AS r
    JOIN pg_class AS t ON t.oid = r.reltoastrelid
    UNION ALL
    SELECT oid::regclass::text, 'acl', coalesce(relacl, acldefault('r', relowner))::text FROM relation
    UNION ALL
    SELECT oid::regclass::text, 'view', pg_get_viewdef(oid) FROM relation WHERE relkind IN ('v', 'm')
    UNION ALL
    SELECT oid::regclass::text, 'index', pg_get_indexdef(oid) FROM relation WHERE relkind = 'i'
    UNION ALL
    SELECT a.attrelid::regclass::text, format('column %s %I', a.attnum, a.attname), concat_ws(' ',
        format_type(a.atttypid, a.atttypmod), 'not null', a.attnotnull, 'collation', a.attcollation::regcollation,
        'default', pg_get_expr(d.adbin, d.adrelid), 'identity', a.attidentity, 'generated', a.attgenerated,
        'storage', a.attstorage, a.attcompression, 'statistics', a.attstattarget, 'acl', a.attacl, 'options', a.attoptions)
    FROM relation AS r
    JOIN pg_attribute AS a ON a.attrelid = r.oid AND a.attnum > 0 AND NOT a.attisdropped
    LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    UNION ALL
    SELECT c.conrelid::regclass::text, format('constraint %I', c.conname), concat_ws(' ', pg_get_constraintdef(c.oid), c.convalidated)
    FROM pg_constraint AS c
    JOIN relation AS r ON r.oid = c.conrelid
    UNION ALL
    SELECT t.tgrelid::regclass::text, format('trigger %I', t.tgname), concat_ws(' ', pg_get_triggerdef(t.oid), t.tgenabled)
    FROM pg_trigger AS t
    JOIN relation AS r ON r.oid = t.tgrelid
    WHERE NOT t.tgisinternal
    UNION ALL
    SELECT p.polrelid::regclass::text, format('policy %I', p.polname), concat_ws(' ', p.polcmd, p.polpermissive, p.polroles,
        pg_get_expr(p.polqual, p.polrelid), pg_get_expr(p.polwithcheck, p.polrelid))
    FROM pg_policy AS p
    JOIN relation AS r ON r.oid = p.polrelid
    UNION ALL
    SELECT oid::regprocedure::text, 'function', CASE WHEN prokind IN ('f', 'p') THEN pg_get_functiondef(oid) ELSE prokind::text END
    FROM function
    UNION ALL
    SELECT oid::regprocedure::text, 'settings', proconfig::text FROM function
    UNION ALL
    SELECT oid::regprocedure::text, 'owner', pg_get_userbyid(proowner) FROM function
    UNION ALL
    SELECT oid::regprocedure::text, 'acl', coalesce(proacl, acldefault('f', proowner))::text FROM function
    UNION ALL
    -- Array types and the row types of tables are not listed, because they come with their types and tables.
    SELECT t.oid::regtype::text, 'type', concat_ws(' ', t.typtype, 'base', format_type(t.typbasetype, t.typtypmod), t.typnotnull, t.typdefault,
        'enum', (SELECT array_agg(e.enumlabel ORDER BY e.enumsortorder) FROM pg_enum AS e WHERE e.enumtypid = t.oid),
        'owner', pg_get_userbyid(t.typowner), 'acl', coalesce(t.typacl, acldefault('T', t.typowner)))
    FROM pg_type AS t
    JOIN schema AS s ON s.oid = t.typnamespace
    LEFT JOIN relation AS r ON r.oid = t.typrelid
    WHERE t.typelem = 0
        AND (t.typrelid = 0 OR r.relkind = 'c')
    UNION ALL
    SELECT pg_describe_object(d.classoid, d.objoid, d.objsubid), 'comment', d.description
    FROM pg_description AS d
    CROSS JOIN LATERAL pg_identify_object(d.classoid, d.objoid, d.objsubid) AS o
    WHERE o.schema = quote_ident($1)
        OR (o.schema IS NULL AND o.identity LIKE '% on ' || quote_ident($1) || '.%')
)
SELECT object || ', ' || aspect, coalesce(value, 'none')
FROM catalog
ORDER BY 1, 2
