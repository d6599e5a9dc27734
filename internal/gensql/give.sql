-- Give the remembered rights back, except on functions that are gone or have other arguments.
DO $$
DECLARE
    path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
    function pg_catalog.text;
    statement pg_catalog.text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    FOR function, statement IN
        SELECT g ->> 0, g ->> 1 FROM json_array_elements(current_setting('rate_limit.grants')::json) AS g
    LOOP
        IF to_regprocedure(function) IS NOT NULL THEN
            EXECUTE statement;
        END IF;
    END LOOP;
    PERFORM set_config('rate_limit.grants', '[]', false);
    PERFORM pg_catalog.set_config('search_path', path, true);
END
$$;
