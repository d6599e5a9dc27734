-- This query returns whether JIT compiles statements that call the functions in this session. This happens if the plan
-- costs more than jit_above_cost, because the functions' jit = off does not apply to the statement itself. The command
-- has turned jit off, so the query restores the session's setting.
SELECT
    -- Ask for the compiler last, because asking loads it, which takes 100 ms.
    CASE WHEN above.jit = 'on' AND above.cost >= 0 AND above.cost < coalesce((
        SELECT max(p.procost * current_setting('cpu_operator_cost')::float8
            + p.prorows * current_setting('cpu_tuple_cost')::float8)
        FROM pg_proc AS p
        JOIN pg_namespace AS n ON n.oid = p.pronamespace
        WHERE n.nspname = current_setting('pgratelimit.schema') AND starts_with(p.proname, 'rate_limit_')
    ), 0) THEN pg_jit_available() ELSE false END,
    above.cost
FROM (
    SELECT current_setting('jit_above_cost')::float8 AS cost, set_config('jit', s.reset_val, true) AS jit
    FROM pg_settings AS s
    WHERE s.name = 'jit'
    OFFSET 0
) AS above
