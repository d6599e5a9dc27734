-- Each function for rate_limit_ephemeral gets a copy for rate_limit_durable. Only the table's name differs. For
-- example, rate_limit_take_fixed_window calls _rate_limit_take_fixed_window_durable, which has the rights and settings
-- of its caller. (access.sql explains why names in this block have a schema.) The name of the schema may contain the
-- table's name, so chr(1) takes its place meanwhile.
DO $$
DECLARE
    path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
    schema CONSTANT pg_catalog.name := pg_catalog.current_schema();
    prefix CONSTANT pg_catalog.text := pg_catalog.concat(pg_catalog.quote_ident(schema), '.');
    texts pg_catalog.text[];
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    PERFORM set_config('quote_all_identifiers', 'off', true); -- otherwise more names may be quoted
    texts := ARRAY(
        SELECT replace(replace(replace(replace(
            regexp_replace(pg_get_functiondef(p.oid), replace('| SECURITY DEFINER(| SET [^|]*)*', '|', chr(10)), ''),
            '.' || p.proname || '(',
            '.' || CASE WHEN p.proname LIKE 'rate%' THEN '_' || p.proname || '_durable' ELSE p.proname END || '('),
            prefix, chr(1)), 'ephemeral', 'durable'), chr(1), prefix)
        FROM pg_proc AS p
        WHERE p.pronamespace = (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = schema)
            AND p.proowner = (SELECT r.oid FROM pg_roles AS r WHERE r.rolname = current_user)
            AND p.proname IN (
                'rate_limit_take_fixed_window', 'rate_limit_take_sliding_window', 'rate_limit_take_token_bucket',
                'rate_limit_take_calendar_window', '_rate_limit_left_ephemeral', '_rate_limit_take_all_ephemeral',
                '_rate_limit_live_ephemeral', '_rate_limit_beside_ephemeral', '_rate_limit_earliest_ephemeral',
                '_rate_limit_note_ends_ephemeral', '_rate_limit_write_holds_ephemeral',
                '_rate_limit_slots_after_ephemeral', '_rate_limit_hand_over_ephemeral',
                '_rate_limit_write_line_ephemeral', '_rate_limit_slot_ephemeral', '_rate_limit_renew_ephemeral'));
    PERFORM pg_catalog.set_config('search_path', path, true);
    FOR i IN 1 .. pg_catalog.cardinality(texts) LOOP
        EXECUTE texts[i];
    END LOOP;
END
$$;
