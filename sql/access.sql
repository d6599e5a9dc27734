-- Who may call, and what the functions see. They run with their owner's rights, so that an application needs nothing but
-- EXECUTE on them; so nobody has that unless it is granted, and names in them are looked up in the schema that they
-- were created in and nowhere else (pg_temp is named last: unnamed, it would come first, and anybody may create there).
DO $$
DECLARE
    fn regprocedure;
BEGIN
    FOR fn IN
        SELECT p.oid
        FROM pg_proc AS p
        WHERE p.pronamespace = quote_ident(current_schema())::regnamespace
            AND p.proname IN ('rate_limit_lock', 'rate_limit_write', 'rate_limit_fixed_window',
                'rate_limit_sliding_window', 'rate_limit_token_bucket', 'rate_limit_sliding_log', 'rate_limit_all', 'rate_limit_reset')
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', fn);
        -- The two internal ones inherit the setting of their caller, and are faster without their own.
        IF fn::text !~ 'rate_limit_(lock|write)\(' THEN
            EXECUTE format('ALTER FUNCTION %s SET search_path = %I, pg_temp', fn, current_schema());
        END IF;
    END LOOP;
END
$$;
