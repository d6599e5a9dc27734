-- Functions for people, triggers and programs in other languages.

-- _rate_limit_ask decides a request, charges cost, makes a hold, or makes a reservation if delay_us is not NULL. For a
-- reservation that is allowed, retry_after is the time until it is ready. If cost is 0, nothing is taken. counted is
-- false if the policy mode decided and nothing was counted. If policy is NULL, the row of rate_limit_policy that is in
-- force for the key decides. With slot, it acquires a slot, and told is the answer: see rate_limit_slots. Texts are
-- compared with the tables' collation, not with the caller's.
CREATE FUNCTION _rate_limit_ask(
    name text, key text, policy text, cost bigint, durable boolean, charges boolean, ttl_us bigint, hold uuid,
    delay_us bigint, slot jsonb,
    OUT allowed boolean, OUT remaining bigint, OUT retry_after interval, OUT reset_after interval,
    OUT retry_after_seconds integer, OUT owed bigint, OUT counted boolean, OUT told bigint[]
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
    place integer;   -- the part with slots
    wait_us bigint;
    reset_us bigint;
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
        counted := false;
        RETURN;
    END IF;
    IF delay_us IS NOT NULL AND 3 <> ANY (p.algorithms) THEN
        RAISE EXCEPTION 'rate_limit: policy has no places in the future'
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'policy',
                HINT = 'Reserve from token buckets only: ''bucket 1 20/1s'' lets one pass every 50 ms.';
    END IF;
    IF slot IS NOT NULL AND (cardinality(array_positions(p.algorithms, 6::smallint)) <> 1
        OR n > 1 AND (slot->>'wait')::boolean)
    THEN
        RAISE EXCEPTION 'rate_limit: policy has %', CASE
                WHEN 6 <> ALL (p.algorithms) THEN 'no slots' ELSE 'several parts' END
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'policy',
                HINT = 'Slots need a policy such as ''concurrent 5''. It may have other parts, but not a second one '
                    'with slots. To stand in line, it must have no other part.';
    ELSIF slot IS NULL AND (cost > 0 OR charges) AND 6 = ANY (p.algorithms) THEN
        RAISE EXCEPTION 'rate_limit: policy has slots, of which nothing can be taken'
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'policy',
                HINT = concat('Call rate_limit', '_acquire, and rate_limit', '_release at the end of the work.');
    END IF;
    IF slot IS NOT NULL THEN
        -- The slot comes before the other parts, because every other call takes from them without a slot. If they deny
        -- the request, the slot is given back.
        place := array_position(p.algorithms, 6::smallint);
        SELECT a.granted = 1, a.remaining, a.retry_after_us, a.reset_after_us, a.log
        INTO allowed, remaining, wait_us, reset_us, told
        FROM rate_limit_slots(ARRAY[names[place]], ARRAY[key], ARRAY[coalesce(durable, false)], ARRAY[p.limits[place]],
            ARRAY[cost], ARRAY[ttl_us], ARRAY[hold], ARRAY[slot]) AS a;
        names := names[:place - 1] || names[place + 1:];
        p.algorithms := p.algorithms[:place - 1] || p.algorithms[place + 1:];
        p.limits := p.limits[:place - 1] || p.limits[place + 1:];
        p.spans_us := p.spans_us[:place - 1] || p.spans_us[place + 1:];
        p.refills := p.refills[:place - 1] || p.refills[place + 1:];
        p.zones := p.zones[:place - 1] || p.zones[place + 1:];
        n := n - 1;
    END IF;
    IF slot IS NULL OR allowed AND n > 0 THEN
        SELECT CASE WHEN delay_us IS NULL AND slot IS NULL THEN max(a.retry_after_us) = 0 ELSE min(a.granted) = 1 END,
            least(min(a.remaining), remaining), max(a.retry_after_us), greatest(max(a.reset_after_us), reset_us),
            max(_rate_limit_owed(p.algorithms[a.ord], a.count, a.scale, p.limits[a.ord])),
            cost > 0 AND bool_or(a.granted = 0),
            min(CASE WHEN charges THEN _rate_limit_chargeable(p.algorithms[a.ord], a.count, a.credit, a.scale,
                p.limits[a.ord], p.spans_us[a.ord], p.refills[a.ord]) END)
        INTO allowed, remaining, wait_us, reset_us, owed, refused, accepted
        FROM rate_limit_all(
            array_fill(1, ARRAY[n]), names, array_fill(key, ARRAY[n]), array_fill(coalesce(durable, false), ARRAY[n]),
            p.algorithms, p.limits, p.spans_us, p.refills, array_fill(cost, ARRAY[n]), NULL::bigint[],
            NULL::integer, NULL::boolean, NULL::timestamptz,
            NULL::bigint[], NULL::bigint[], NULL::bigint[], NULL::bigint[], false, p.zones,
            NULL::bigint[], array_fill(charges, ARRAY[n]),
            CASE WHEN hold IS NOT NULL AND slot IS NULL THEN array_fill(ttl_us, ARRAY[n]) END,
            CASE WHEN hold IS NOT NULL AND slot IS NULL THEN array_fill(hold, ARRAY[n]) END,
            CASE WHEN delay_us IS NOT NULL THEN array_fill(delay_us, ARRAY[n]) END) AS a;
        IF slot IS NOT NULL AND NOT allowed THEN
            PERFORM rate_limit_release(hold);
            told := NULL;
        END IF;
    END IF;
    retry_after := wait_us * interval '1 microsecond';
    reset_after := reset_us * interval '1 microsecond';
    retry_after_seconds := least((wait_us + 999999) / 1000000, 2147483647);
    counted := true;
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
    FROM _rate_limit_ask(name COLLATE "C", key COLLATE "C", policy COLLATE "C", cost, durable, false,
        NULL::bigint, NULL::uuid, NULL::bigint, NULL::jsonb) AS a;
END
$$;

COMMENT ON FUNCTION rate_limit_allow IS 'Takes cost from a key''s limit if it fits, or takes nothing.
Example: SELECT * FROM rate_limit_allow(''login'', ''user:123'', ''sliding 10/1m'')
  name         the limiter. Limiters with different names do not share rows
  key          who is limited
  policy       fixed 100/1m, sliding 100/1m, bucket 20 5/10s, log 100/1m, every 1000/month Europe/Berlin -
               or several of these with commas, which must all fit. Durations: 10s, 1m, 1h30m, 30d.
               Calendar windows: minute, hour, day, week, month. The default time zone is UTC. With a duration
               instead, such as every 100/1m, windows begin at multiples of it since 1970.
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
    FROM _rate_limit_ask(name COLLATE "C", key COLLATE "C", policy COLLATE "C", 0::bigint, durable, false,
        NULL::bigint, NULL::uuid, NULL::bigint, NULL::jsonb) AS a;
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
    FROM _rate_limit_ask(name COLLATE "C", key COLLATE "C", policy COLLATE "C", cost, durable, true,
        NULL::bigint, NULL::uuid, NULL::bigint, NULL::jsonb) AS a;
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

CREATE FUNCTION rate_limit_reserve(
    name text, key text, policy text DEFAULT NULL, cost bigint DEFAULT 1,
    max_delay interval DEFAULT interval '1 minute', durable boolean DEFAULT false,
    OUT allowed boolean, OUT ready_after interval, OUT remaining bigint, OUT retry_after interval,
    OUT reset_after interval, OUT retry_after_seconds integer
)
LANGUAGE plpgsql
SECURITY DEFINER
AS $$
#variable_conflict use_variable
BEGIN
    IF (max_delay >= interval '0' AND max_delay <= interval '71 years') IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: max_delay is %', coalesce(max_delay::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'max_delay',
                HINT = 'It is how long you are ready to wait, from 0 to 71 years.';
    ELSIF (cost >= 1) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: cost is %, and a reservation needs at least 1', coalesce(cost::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'cost', HINT = 'Reserve what the next step needs.';
    END IF;
    SELECT a.allowed, a.remaining, a.retry_after, a.reset_after, a.retry_after_seconds
    INTO allowed, remaining, retry_after, reset_after, retry_after_seconds
    FROM _rate_limit_ask(name COLLATE "C", key COLLATE "C", policy COLLATE "C", cost, durable, false,
        NULL::bigint, NULL::uuid, (extract(epoch FROM max_delay) * 1000000)::bigint, NULL::jsonb) AS a;
    IF allowed THEN
        ready_after := retry_after;
        retry_after := interval '0';
        retry_after_seconds := 0;
    END IF;
END
$$;

COMMENT ON FUNCTION rate_limit_reserve IS 'Books cost of a key''s token bucket, if it is ready within max_delay.
Example: SELECT * FROM rate_limit_reserve(''partner'', ''acme'', ''bucket 1 20/1s'', max_delay => ''10 seconds'')
  policy       only token buckets: bucket 1 20/1s lets one pass every 50 ms
  max_delay    how long you are ready to wait
See rate_limit_allow for the other parameters. It returns
  allowed      whether cost is booked. A denial books nothing
  ready_after  how long to wait before the next step. NULL if denied. Later calls of all processes come after this one
  remaining    the largest cost that is ready at once
  retry_after  how long until the same reservation is allowed, if no other call takes. 0 if allowed
  reset_after  how long until the key is as good as new
  retry_after_seconds  retry_after in seconds, rounded up';

CREATE FUNCTION rate_limit_hold(
    name text, key text, policy text DEFAULT NULL, cost bigint DEFAULT 1, ttl interval DEFAULT interval '1 minute',
    durable boolean DEFAULT false,
    OUT allowed boolean, OUT hold text, OUT remaining bigint, OUT retry_after interval, OUT reset_after interval,
    OUT retry_after_seconds integer
)
LANGUAGE plpgsql
SECURITY DEFINER
AS $$
#variable_conflict use_variable
DECLARE
    id uuid := _rate_limit_hold_id(key COLLATE "C");
    counted boolean;
BEGIN
    PERFORM _rate_limit_check_ttl(ttl);
    IF (cost >= 1) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: cost is %, and a hold needs at least 1', coalesce(cost::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'cost', HINT = 'Hold the cost that is to be expected.';
    END IF;
    SELECT a.allowed, a.remaining, a.retry_after, a.reset_after, a.retry_after_seconds, a.counted
    INTO allowed, remaining, retry_after, reset_after, retry_after_seconds, counted
    FROM _rate_limit_ask(name COLLATE "C", key COLLATE "C", policy COLLATE "C", cost, durable, false,
        (extract(epoch FROM ttl) * 1000000)::bigint, id, NULL::bigint, NULL::jsonb) AS a;
    hold := CASE WHEN allowed AND counted THEN concat(id, CASE WHEN durable THEN '.d' ELSE '.e' END)
        WHEN allowed THEN '' END;
END
$$;

COMMENT ON FUNCTION rate_limit_hold IS 'Sets cost of a key''s limit aside for at most ttl, if it fits.
Example: SELECT * FROM rate_limit_hold(''tokens'', ''user:123'', ''fixed 100000/1d'', 4000, interval ''2 minutes'')
  ttl          from 1 ms to 24 hours. Then the units are free again
See rate_limit_allow for the other parameters. It returns what rate_limit_allow does, and
  hold         the hold, for rate_limit_settle, rate_limit_cancel and rate_limit_extend. NULL if denied. It is empty in
               the policy mode off, which counts nothing
A call that uses the limit settles the hold when it knows what it has used:
SELECT * FROM rate_limit_settle(<hold>, 2719)';

-- _rate_limit_check_ttl raises an error if ttl is not within the bounds of a hold.
CREATE FUNCTION _rate_limit_check_ttl(ttl interval) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF (ttl BETWEEN interval '1 millisecond' AND interval '24 hours') IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: ttl is %', coalesce(ttl::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'ttl',
                HINT = 'It is from 1 millisecond to 24 hours. Extend the hold while its work goes on.';
    END IF;
END
$$;

-- _rate_limit_unknown_hold raises an error.
CREATE FUNCTION _rate_limit_unknown_hold() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rate_limit: there is no such hold'
        USING ERRCODE = 'RLS06', HINT = 'It is forgotten an hour after its settlement, or 24 hours after its end. '
            'It may be of another database or schema. A crash of the server forgets holds that are not durable.';
END
$$;

-- _rate_limit_parts_of_hold returns the parts of a hold in lock order. It returns nothing for an unknown hold, and for
-- the empty hold that the policy mode off makes.
CREATE FUNCTION _rate_limit_parts_of_hold(hold text, clock bigint) RETURNS TABLE (
    name text, key text, durable boolean, units bigint, ends_at bigint, status smallint, used bigint,
    algorithm smallint, max_count bigint, span_us bigint, refill bigint, zone text
) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    words CONSTANT text[] := regexp_match(hold COLLATE "C",
        '^([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})[.](e|d|ed)$');
    id CONSTANT uuid := words[1]::uuid;
BEGIN
    IF (hold = '' OR words IS NOT NULL) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: hold cannot be read'
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'hold',
                HINT = 'Pass the whole text that the hold was returned as.';
    END IF;
    RETURN QUERY
        SELECT h.prefix, h.key, h.durable, h.units, h.ends_at, h.status, h.used,
            h.algorithm, h.max_count, h.span_us, h.refill, h.zone
        FROM (
            SELECT false AS durable, e.* FROM rate_limit_ephemeral_hold AS e WHERE e.id = id AND words[2] LIKE 'e%'
            UNION ALL
            SELECT true, d.* FROM rate_limit_durable_hold AS d WHERE d.id = id AND words[2] LIKE '%d'
        ) AS h
        WHERE NOT _rate_limit_forgotten(h.status, h.ends_at, h.settled_at, clock)
            AND h.fence = 0 -- a slot is only released
        ORDER BY h.durable, -octet_length(h.key), h.key, h.prefix;
END
$$;

-- _rate_limit_end_hold settles a hold, or extends it if ttl_us is not NULL.
CREATE FUNCTION _rate_limit_end_hold(
    hold text, used bigint, policy text, ttl_us bigint,
    OUT counted bigint, OUT late boolean, OUT settled_at timestamptz, OUT ends_at timestamptz
) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    id uuid;
    n integer;
    settled boolean; -- whether the hold is settled already
    names text[];
    keys text[];
    durables boolean[];
    algorithms smallint[];
    limits bigint[];
    spans_us bigint[];
    refills bigint[];
    zones text[];
    p record;
    granted bigint;
    accepted bigint; -- the largest settlement that the rows accept
    algorithm smallint;
    until bigint;
BEGIN
    IF ttl_us IS NULL AND (used BETWEEN 0 AND 4611686018427387904) IS NOT TRUE THEN
        RAISE EXCEPTION 'rate_limit: used is %', coalesce(used::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'used', HINT = 'It is from 0 to 2^62.';
    END IF;
    IF hold = '' THEN -- made by the policy mode off
        counted := used;
        late := false;
        RETURN;
    END IF;
    -- Every call uses the tables of keys before those of holds. Otherwise it could deadlock with maintenance, which
    -- locks all tables.
    LOCK TABLE rate_limit_ephemeral, rate_limit_durable IN ROW EXCLUSIVE MODE;
    -- The policy of a hold does not change, so this locks no row.
    SELECT count(*), bool_and(h.status = 2), array_agg(h.name ORDER BY h.ordinality),
        array_agg(h.key ORDER BY h.ordinality), array_agg(h.durable ORDER BY h.ordinality),
        array_agg(h.algorithm ORDER BY h.ordinality), array_agg(h.max_count ORDER BY h.ordinality),
        array_agg(h.span_us ORDER BY h.ordinality), array_agg(h.refill ORDER BY h.ordinality),
        array_agg(coalesce(h.zone, 'UTC') ORDER BY h.ordinality)
    INTO n, settled, names, keys, durables, algorithms, limits, spans_us, refills, zones
    FROM _rate_limit_parts_of_hold(hold, _rate_limit_now(NULL::bigint)) WITH ORDINALITY AS h;
    id := left(hold, 36)::uuid;
    IF n = 0 THEN
        PERFORM _rate_limit_unknown_hold();
    ELSIF policy IS NOT NULL THEN
        SELECT * INTO p FROM _rate_limit_read_policy(policy);
        IF cardinality(p.algorithms) <> n THEN
            RAISE EXCEPTION 'rate_limit: policy has % parts, and the hold has %', cardinality(p.algorithms), n
                USING ERRCODE = 'invalid_parameter_value', COLUMN = 'policy',
                    HINT = 'Leave the policy out to count by the policy of the hold.';
        END IF;
        algorithms := p.algorithms;
        limits := p.limits;
        spans_us := p.spans_us;
        refills := p.refills;
        zones := ARRAY(SELECT coalesce(z.zone, 'UTC') FROM unnest(p.zones) WITH ORDINALITY AS z (zone, i) ORDER BY z.i);
    END IF;
    FOR i IN 1 .. CASE WHEN used > 0 AND policy IS NULL AND NOT settled THEN n ELSE 0 END LOOP
        IF durables[i] THEN
            SELECT d.algorithm, d.expires_at INTO algorithm, until
            FROM rate_limit_durable AS d WHERE d.prefix = names[i] AND d.key = keys[i] FOR UPDATE;
        ELSE
            SELECT d.algorithm, d.expires_at INTO algorithm, until
            FROM rate_limit_ephemeral AS d WHERE d.prefix = names[i] AND d.key = keys[i] FOR UPDATE;
        END IF;
        IF algorithm <> algorithms[i] AND until > _rate_limit_now(NULL::bigint) THEN
            RAISE EXCEPTION 'rate_limit: the key now counts by another algorithm than the hold'
                USING ERRCODE = 'RLS08',
                    HINT = 'Nothing was settled. Settle with the policy that is in force for the key.';
        END IF;
    END LOOP;
    SELECT min(a.granted), max(a.log[1]), max(a.log[2]) = 1,
        timestamptz 'epoch' + max(a.log[3]) * interval '1 us',
        min(CASE WHEN a.granted = 0 THEN _rate_limit_chargeable(algorithms[a.ord], a.count, a.credit, a.scale,
            limits[a.ord], spans_us[a.ord], refills[a.ord]) END)
    INTO granted, counted, late, settled_at, accepted
    FROM rate_limit_all(
        array_fill(1, ARRAY[n]), names, keys, durables, algorithms, limits, spans_us, refills,
        array_fill(coalesce(used, 0), ARRAY[n]), NULL::bigint[], NULL::integer, NULL::boolean, NULL::timestamptz,
        NULL::bigint[], NULL::bigint[], NULL::bigint[], NULL::bigint[], false, zones, NULL::bigint[],
        array_fill(ttl_us IS NULL, ARRAY[n]), array_fill(ttl_us, ARRAY[n]), array_fill(id, ARRAY[n]),
        NULL::bigint[]) AS a;
    IF granted = 0 THEN
        RAISE EXCEPTION 'rate_limit: a settlement of % is too large, and % would be accepted', used, accepted
            USING ERRCODE = 'RLS05', DETAIL = accepted::text,
                HINT = 'A key can owe 10 times its limit. The hold is as before. Settle less, or raise the limit.';
    ELSIF granted = -4 THEN
        RAISE EXCEPTION 'rate_limit: the hold has ended'
            USING ERRCODE = 'RLS07', HINT = 'Settle it all the same, and make another hold if more is to come.';
    ELSIF granted = -3 AND counted IS NULL THEN -- it was forgotten in the meantime
        PERFORM _rate_limit_unknown_hold();
    END IF;
    IF ttl_us IS NOT NULL THEN
        ends_at := timestamptz 'epoch' + interval '1 us' * min(h.ends_at)
            FROM _rate_limit_parts_of_hold(hold, _rate_limit_now(NULL::bigint)) AS h;
    END IF;
END
$$;

CREATE FUNCTION rate_limit_settle(
    hold text, used bigint, policy text DEFAULT NULL,
    OUT counted bigint, OUT late boolean, OUT settled_at timestamptz
)
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
BEGIN
    SELECT e.counted, e.late, e.settled_at INTO counted, late, settled_at
    FROM _rate_limit_end_hold(hold COLLATE "C", used, policy COLLATE "C", NULL::bigint) AS e;
END
$$;

COMMENT ON FUNCTION rate_limit_settle IS 'Ends a hold, and counts what was really used, whether it fits or not.
Example: SELECT * FROM rate_limit_settle(
    (SELECT hold FROM rate_limit_hold(''tokens'', ''user:123'', ''fixed 9000/1d'')), 7)
  hold         what rate_limit_hold has returned as hold
  used         what was used, which may be more than was held
  policy       the policy to count by. NULL (the default) is the policy that the hold was made with
It returns
  counted      what was counted
  late         whether the hold had ended. It counts all the same
  settled_at   when it was settled
A hold is settled once. A repetition changes nothing, and returns the first answer, for an hour.
SQLSTATE RLS05: the key would owe too much, as in rate_limit_charge. RLS06: there is no such hold.
RLS08: the key''s policy now has another algorithm, so pass the policy that is in force.';

CREATE FUNCTION rate_limit_cancel(hold text, OUT counted bigint, OUT late boolean, OUT settled_at timestamptz)
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
BEGIN
    SELECT e.counted, e.late, e.settled_at INTO counted, late, settled_at
    FROM _rate_limit_end_hold(hold COLLATE "C", 0::bigint, NULL::text, NULL::bigint) AS e;
END
$$;

COMMENT ON FUNCTION rate_limit_cancel IS 'Ends a hold of which nothing was used. It settles the hold with 0.
Example: SELECT * FROM rate_limit_cancel(
    (SELECT hold FROM rate_limit_hold(''tokens'', ''user:123'', ''fixed 9000/1d'')))';

CREATE FUNCTION rate_limit_extend(hold text, ttl interval, OUT ends_at timestamptz)
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
BEGIN
    PERFORM _rate_limit_check_ttl(ttl);
    SELECT e.ends_at INTO ends_at
    FROM _rate_limit_end_hold(hold COLLATE "C", NULL::bigint, NULL::text,
        (extract(epoch FROM ttl) * 1000000)::bigint) AS e;
END
$$;

COMMENT ON FUNCTION rate_limit_extend IS 'Makes a hold last for at least ttl from now, and returns when it ends.
Example: SELECT rate_limit_extend(
    (SELECT hold FROM rate_limit_hold(''tokens'', ''user:123'', ''fixed 9000/1d'')), ''2 minutes'')
SQLSTATE RLS06: there is no such hold. RLS07: it has ended or is settled, so its units may be taken.';

CREATE FUNCTION rate_limit_find_hold(
    hold text, now timestamptz DEFAULT NULL,
    OUT name text, OUT key text, OUT durable boolean, OUT units bigint, OUT ends_at timestamptz, OUT live boolean,
    OUT used bigint
) RETURNS SETOF record
LANGUAGE plpgsql
SECURITY DEFINER
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    clock CONSTANT bigint := _rate_limit_now((extract(epoch FROM now) * 1000000)::bigint);
BEGIN
    RETURN QUERY
        SELECT h.name, h.key, h.durable, h.units, timestamptz 'epoch' + h.ends_at * interval '1 us',
            h.status = 0 AND h.ends_at > clock, h.used
        FROM _rate_limit_parts_of_hold(hold COLLATE "C", clock) WITH ORDINALITY AS h
        ORDER BY h.ordinality;
END
$$;

COMMENT ON FUNCTION rate_limit_find_hold IS 'Shows a hold: a row for each part of its policy.
Example: SELECT * FROM rate_limit_find_hold(
    (SELECT hold FROM rate_limit_hold(''tokens'', ''user:123'', ''fixed 9000/1d'')))
It returns
  name, key, durable  the limit: see rate_limit_allow
  units               how many units are held
  ends_at             from then on they are free, if the hold is not settled before
  live                whether they are held now
  used                what the settlement has counted. NULL if the hold is not settled
It returns no row if there is no such hold. now is for tests.';
