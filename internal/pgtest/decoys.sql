-- This script creates decoys in a schema: functions and operators that fail. Decoys overload the functions and
-- operators that a text uses, for the types of the limiter's SQL. Postgres prefers a decoy with exactly the types of a
-- call to a function of pg_catalog that needs a cast or accepts any type.
--
--   decoys.names   the words before a parenthesis in the text; those that name functions of pg_catalog are overloaded
--   decoys.text    the text; the operators of pg_catalog in it are overloaded
--   decoys.types   the argument types; arrays of the limiter's row types are added
--   decoys.mixed   the types of which each is combined with each; two arguments of other types are of the same type, or an
--                  array and its element
--   decoys.schema  the schema for the decoys
--   decoys.ours    the schema of the limiter's functions, which are overloaded too; '' if there is none
SET LOCAL search_path = pg_catalog;
SET LOCAL check_function_bodies = off;
SET LOCAL jit = off; -- compiling would take a second
DO $do$
DECLARE
    source CONSTANT text := current_setting('decoys.text');
    schema CONSTANT text := current_setting('decoys.schema');
    ours CONSTANT text := current_setting('decoys.ours');
    types text[] := string_to_array(current_setting('decoys.types'), ' ');
    mixed text[] := string_to_array(current_setting('decoys.mixed'), ' ');
    made text[] := '{}'; -- CREATE statements; running them one by one would make each repeat all catalog look-ups
    number integer := 0;
    called text[];  -- names of functions in pg_catalog
    symbols text[]; -- names of operators in pg_catalog
    decoy record;
BEGIN
    types := ARRAY(SELECT t::regtype::text FROM unnest(types) AS t); -- the types' names as Postgres prints them
    mixed := ARRAY(SELECT t::regtype::text FROM unnest(mixed) AS t);
    SELECT types || coalesce(array_agg(c.oid::regtype::text) || array_agg(c.oid::regtype::text || '[]'), '{}')
    INTO types
    FROM pg_type AS c
    WHERE c.typnamespace = (SELECT oid FROM pg_namespace WHERE nspname = ours) AND c.typname LIKE 'rate\_limit\_%' AND c.typtype = 'c'
        AND EXISTS (SELECT FROM pg_class AS r WHERE r.oid = c.typrelid AND r.relkind = 'c' AND r.relname LIKE '%\_row');

    SELECT array_agg(DISTINCT p.proname::text) INTO called
    FROM pg_proc AS p
    WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.proname::text = ANY (string_to_array(current_setting('decoys.names'), ' '));
    symbols := ARRAY(SELECT DISTINCT oprname::text FROM pg_operator WHERE oprnamespace = 'pg_catalog'::regnamespace AND strpos(source, oprname) > 0);

    FOR decoy IN
        SELECT DISTINCT ON (name, replace(arguments, 'VARIADIC ', '')) name, arguments
        FROM (
        -- Overload functions of one or two arguments for all types.
        SELECT name, format('(%s)', a) AS arguments FROM unnest(called) AS name, unnest(types) AS a
        UNION
        SELECT name, format('(%s, %s)', a, b)
        FROM unnest(called) AS name, unnest(types) AS a, unnest(types) AS b
        WHERE (b IN (a, a || '[]') OR a = b || '[]' OR a = ANY (mixed) AND b = ANY (mixed)) AND EXISTS (SELECT FROM pg_proc AS p WHERE p.proname = name AND p.pronamespace = 'pg_catalog'::regnamespace AND (p.pronargs = 2 OR p.provariadic <> 0))
        UNION
        -- Overload functions of any number of arguments.
        SELECT p.proname, format('(%sVARIADIC %s[])', CASE WHEN p.pronargs = 2 THEN 'text, ' ELSE '' END, a)
        FROM pg_proc AS p, unnest(types) AS a
        WHERE p.proname = ANY (called) AND p.pronamespace = 'pg_catalog'::regnamespace AND p.provariadic <> 0 AND a NOT LIKE '%[]'
        UNION
        -- Overload functions of two or more arguments. Replace only arguments of any type.
        SELECT p.proname, format('(%s)', (
            SELECT string_agg(CASE
                WHEN t.typname IN ('anyarray', 'anycompatiblearray') THEN a || '[]'
                WHEN t.typname IN ('anyelement', 'anycompatible', 'anynonarray', 'any') THEN a
                ELSE t.oid::regtype::text END, ', ' ORDER BY e.place)
            FROM unnest(p.proargtypes) WITH ORDINALITY AS e (type, place)
            JOIN pg_type AS t ON t.oid = e.type))
        FROM pg_proc AS p, unnest(types) AS a
        WHERE p.proname = ANY (called) AND p.pronamespace = 'pg_catalog'::regnamespace AND p.pronargs >= 2 AND a NOT LIKE '%[]' AND 'internal'::regtype <> ALL (p.proargtypes::oid[])
        UNION
        -- Overload the limiter's functions: without optional arguments, and with another type of number in each place.
        SELECT p.proname, format('(%s)', (
            SELECT string_agg(CASE WHEN e.place = changed THEN kind || CASE WHEN t.typelem <> 0 THEN '[]' ELSE '' END ELSE t.oid::regtype::text END, ', ' ORDER BY e.place)
            FROM unnest(p.proargtypes) WITH ORDINALITY AS e (type, place)
            JOIN pg_type AS t ON t.oid = e.type
            WHERE e.place <= n))
        FROM pg_proc AS p, generate_series((p.pronargs - p.pronargdefaults)::integer, p.pronargs::integer) AS n, generate_series(0, n) AS changed,
            unnest(ARRAY['smallint', 'integer', 'bigint', 'numeric']) AS kind
        WHERE p.pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = ours) AND ltrim(p.proname, '_') LIKE 'rate\_limit\_%' AND p.pronargs > 0
            AND (changed > 0 OR n < p.pronargs)
        ) AS decoys
        ORDER BY name, replace(arguments, 'VARIADIC ', ''), arguments DESC
    LOOP
        CONTINUE WHEN decoy.arguments NOT LIKE '%VARIADIC%' AND to_regprocedure(format('%I.%I%s', schema, decoy.name, decoy.arguments)) IS NOT NULL; -- the limiter has this function itself
        made := made || format('CREATE FUNCTION %I.%I%s RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION %L, current_user; END $$',
            schema, decoy.name, decoy.arguments, format('decoy %I.%I%s was run by %%', schema, decoy.name, decoy.arguments));
    END LOOP;

    FOR decoy IN
        SELECT format('%s, %s', a, b) AS arguments, a, b FROM unnest(types) AS a, unnest(types) AS b
        WHERE b IN (a, a || '[]') OR a = b || '[]' OR a = ANY (mixed) AND b = ANY (mixed)
        UNION ALL
        SELECT a, NULL, a FROM unnest(types) AS a
    LOOP
        number := number + 1;
        made := made || format('CREATE FUNCTION %I.decoy_operator_%s(%s) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION %L; END $$',
            schema, number, decoy.arguments, format('decoy operator of %I for %s was run', schema, decoy.arguments));
        made := made || ARRAY(
            SELECT format('CREATE OPERATOR %1$I.%2$s (FUNCTION = %1$I.decoy_operator_%3$s, RIGHTARG = %4$s %5$s)',
                schema, o.oprname, number, decoy.b, ', LEFTARG = ' || decoy.a)
            FROM unnest(symbols) AS o (oprname)
            WHERE decoy.a IS NOT NULL OR o.oprname IN ('+', '-', '~', '|/', '||/', '@', '@@', '@-@', '!!', '#', '?|', '?-'));
    END LOOP;
    ASSERT cardinality(made) > 1000, cardinality(made);
    EXECUTE array_to_string(made, ';');
END
$do$;
