-- Functions for people, triggers and programs in other languages.

-- _rate_limit_ask decides a request, or charges cost. If cost is 0, nothing is taken. If policy is NULL, the row of
-- rate_limit_policy that is in force for the key decides. Texts are compared with the tables' collation, not with the
-- caller's.
CREATE FUNCTION _rate_limit_ask(
    name text, key text, policy text, cost bigint, durable boolean, charges boolean,
    OUT allowed boolean, OUT remaining bigint, OUT retry_after interval, OUT reset_after interval,
    OUT retry_after_seconds integer, OUT owed bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    clock timestamptz;
    mode text;        -- the mode of the row of rate_limit_policy that decides
    until timestamptz;
    p record;
    n integer;
    names text[]; -- the names in the rows of the policy's parts: name, name/2, name/3 and so on
    accepted bigint; -- the largest charge that the rows accept
    refused boolean; -- whether the charge is larger
BEGIN
    IF policy IS NULL THEN
        clock := clock_timestamp();
        FOR mode, policy, until IN
            -- The modes off and deny need no policy, so any policy is good.
            SELECT r.mode, CASE r.mode WHEN 'enforce' THEN r.policy ELSE 'fixed 1/1s' END, r.valid_until
            FROM rate_limit_policy AS r
            WHERE r.name = name AND r.valid_from <= clock AND r.valid_until > clock
                AND r.mode IN ('enforce', 'off', 'deny')
                AND (r.key = key OR r.key IS NULL AND coalesce(starts_with(key, r.key_prefix), true))
            ORDER BY r.key IS NULL, octet_length(r.key_prefix) DESC NULLS LAST, r.valid_from DESC, r.id DESC
        LOOP
            BEGIN
                SELECT * INTO p FROM _rate_limit_read_policy(policy);
                EXIT;
            EXCEPTION WHEN invalid_parameter_value THEN -- the row was written without triggers; limiters also ignore it
                policy := NULL;
            END;
        END LOOP;
        IF policy IS NULL AND name <> '' AND key <> '' THEN -- invalid names and keys raise an error below
            RAISE EXCEPTION 'rate_limit: no policy is given, and none is in force for the key'
                USING ERRCODE = 'invalid_parameter_value', COLUMN = 'policy',
                    -- A literal must not contain the name of a table, because access.sql would insert the schema into
                    -- the literal.
                    HINT = 'Pass a policy, such as ''sliding 10/1m'', or set one for everybody: INSERT INTO rate_limit'
                        '_policy (name, policy, comment) VALUES (<name>, ''sliding 10/1m'', <why>).';
        END IF;
    END IF;
    IF p IS NULL THEN
        SELECT * INTO p FROM _rate_limit_read_policy(CASE WHEN clock IS NULL THEN policy ELSE 'fixed 1/1s' END);
    END IF;
    n := cardinality(p.algorithms);
    names := ARRAY(
        SELECT CASE WHEN i = 1 THEN name ELSE concat(name, '/', i) END FROM generate_series(1, n) AS i ORDER BY i);
    IF (octet_length(name) >= 1 AND octet_length(names[n]) <= 128) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: name is NULL, empty or too long'
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'name',
                HINT = 'A name has 1 to 128 bytes. A policy of several parts adds 2 of them.';
    END IF;
    IF (octet_length(key) BETWEEN 1 AND 512) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: key is NULL, empty or too long'
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'key',
                HINT = 'A key has 1 to 512 bytes. Hash longer ones.';
    END IF;
    IF (cost >= 0 AND (charges OR cost <= ALL (p.limits) OR mode IN ('off', 'deny'))) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: cost is %, and the policy can never allow it', coalesce(cost::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'cost',
                HINT = 'It is at least 0, and at most the smallest limit. Ask for less at once, or raise the limit.';
    END IF;
    IF mode IN ('off', 'deny') THEN
        allowed := mode = 'off';
        remaining := CASE WHEN allowed THEN 9223372036854775807 ELSE 0 END;
        retry_after := CASE WHEN allowed THEN interval '0'
            ELSE least(until, clock + interval '292 years') - clock END;
        reset_after := retry_after;
        retry_after_seconds := least(ceil(extract(epoch FROM retry_after)), 2147483647);
        owed := 0;
        RETURN;
    END IF;
    SELECT max(a.retry_after_us) = 0, min(a.remaining),
        max(a.retry_after_us) * interval '1 microsecond', max(a.reset_after_us) * interval '1 microsecond',
        least((max(a.retry_after_us) + 999999) / 1000000, 2147483647),
        max(_rate_limit_owed(p.algorithms[a.ord], a.count, a.scale, p.limits[a.ord])),
        cost > 0 AND bool_or(a.granted = 0),
        min(CASE WHEN charges THEN _rate_limit_chargeable(p.algorithms[a.ord], a.count, a.credit, a.scale,
            p.limits[a.ord], p.spans_us[a.ord], p.refills[a.ord]) END)
    INTO allowed, remaining, retry_after, reset_after, retry_after_seconds, owed, refused, accepted
    FROM rate_limit_all(
        array_fill(1, ARRAY[n]), names, array_fill(key, ARRAY[n]), array_fill(coalesce(durable, false), ARRAY[n]),
        p.algorithms, p.limits, p.spans_us, p.refills, array_fill(cost, ARRAY[n]), NULL::bigint[],
        NULL::integer, NULL::boolean, NULL::timestamptz,
        NULL::bigint[], NULL::bigint[], NULL::bigint[], NULL::bigint[], false, p.zones,
        NULL::bigint[], array_fill(charges, ARRAY[n]), NULL::bigint[], NULL::uuid[]) AS a;
    IF charges AND refused THEN
        RAISE EXCEPTION 'rate_limit: a charge of % is too large, and % would be accepted', cost, accepted
            USING ERRCODE = 'RLS05', DETAIL = accepted::text,
                HINT = 'A key can owe 10 times its limit. Charge less, or raise the limit.';
    END IF;
END
$$;

CREATE FUNCTION rate_limit_allow(
    name text, key text, policy text DEFAULT NULL, cost bigint DEFAULT 1, durable boolean DEFAULT false,
    OUT allowed boolean, OUT remaining bigint, OUT retry_after interval, OUT reset_after interval,
    OUT retry_after_seconds integer
)
LANGUAGE plpgsql
SECURITY DEFINER
AS $$
#variable_conflict use_variable
BEGIN
    SELECT a.allowed, a.remaining, a.retry_after, a.reset_after, a.retry_after_seconds
    INTO allowed, remaining, retry_after, reset_after, retry_after_seconds
    FROM _rate_limit_ask(name COLLATE "C", key COLLATE "C", policy COLLATE "C", cost, durable, false) AS a;
END
$$;

COMMENT ON FUNCTION rate_limit_allow IS 'Takes cost from a key''s limit if it fits, or takes nothing.
Example: SELECT * FROM rate_limit_allow(''login'', ''user:123'', ''sliding 10/1m'')
  name         the limiter. Limiters with different names do not share rows
  key          who is limited
  policy       fixed 100/1m, sliding 100/1m, bucket 20 5/10s, log 100/1m, every 1000/month Europe/Berlin -
               or several of these with commas, which must all fit. Durations: 10s, 1m, 1h30m, 30d.
               Calendar windows: minute, hour, day, week, month. The default time zone is UTC.
               NULL (the default) is the policy in rate_limit_policy that is in force for the key
  durable      whether to keep the limit in rate_limit_durable, which survives a crash
It returns
  allowed      whether cost fitted. A denial takes nothing
  remaining    the largest cost that would be allowed next
  retry_after  how long until the same cost fits, if no other call takes. 0 if allowed
  reset_after  how long until the key is as good as new
  retry_after_seconds  retry_after in seconds, rounded up, for a header Retry-After. At most 2147483647
The take commits or rolls back with the transaction.
Until the transaction ends, other calls for the key wait.
A transaction that calls this for several keys must do so in a fixed order, because two transactions can deadlock.';

CREATE FUNCTION rate_limit_peek(
    name text, key text, policy text DEFAULT NULL, durable boolean DEFAULT false,
    OUT allowed boolean, OUT remaining bigint, OUT retry_after interval, OUT reset_after interval,
    OUT retry_after_seconds integer
)
LANGUAGE plpgsql
SECURITY DEFINER
AS $$
#variable_conflict use_variable
BEGIN
    SELECT a.allowed, a.remaining, a.retry_after, a.reset_after, a.retry_after_seconds
    INTO allowed, remaining, retry_after, reset_after, retry_after_seconds
    FROM _rate_limit_ask(name COLLATE "C", key COLLATE "C", policy COLLATE "C", 0::bigint, durable, false) AS a;
END
$$;

COMMENT ON FUNCTION rate_limit_peek IS 'Shows what is left of a key''s limit, and takes nothing.
allowed tells whether a cost of 1 would fit. See rate_limit_allow for the rest.
Example: SELECT * FROM rate_limit_peek(''login'', ''user:123'', ''sliding 10/1m'')';

CREATE FUNCTION rate_limit_charge(
    name text, key text, policy text DEFAULT NULL, cost bigint DEFAULT 1, durable boolean DEFAULT false,
    OUT remaining bigint, OUT owed bigint, OUT retry_after interval, OUT reset_after interval,
    OUT retry_after_seconds integer
)
LANGUAGE plpgsql
SECURITY DEFINER
AS $$
#variable_conflict use_variable
BEGIN
    SELECT a.remaining, a.owed, a.retry_after, a.reset_after, a.retry_after_seconds
    INTO remaining, owed, retry_after, reset_after, retry_after_seconds
    FROM _rate_limit_ask(name COLLATE "C", key COLLATE "C", policy COLLATE "C", cost, durable, true) AS a;
END
$$;

COMMENT ON FUNCTION rate_limit_charge IS 'Counts what was used, whether it fits into a key''s limit or not.
Example: SELECT * FROM rate_limit_charge(''tokens'', ''user:123'', ''fixed 100000/1d'', 2719)
See rate_limit_allow for the parameters. It returns
  remaining    the largest cost that would be allowed next
  owed         how much the key counts above its limit. Requests are denied until enough of it has drained
  retry_after  how long until a cost of 1 fits, if no other call takes. 0 if it fits now
  reset_after  how long until the key is as good as new
  retry_after_seconds  retry_after in seconds, rounded up
A key can owe 10 times its limit. A larger charge counts nothing and raises an error with SQLSTATE RLS05, whose DETAIL
is the charge that would be accepted. The policy modes off and deny count nothing.';
