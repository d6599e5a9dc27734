-- Charges. A charge counts what has already happened, whether it fits or not. It uses the ordinary room first, then
-- granted credit, and the rest is counted above the limit: the key owes it, and is denied until enough has drained.
-- Tests compare these functions with internal/model/charge.go.

-- _rate_limit_max_owed returns how much a key can owe: 10 limits. It is less at the edge of the exact range, because
-- max_count plus the result must be in the range.
CREATE FUNCTION _rate_limit_max_owed(algorithm smallint, max_count bigint, span_us bigint, refill bigint)
RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    most bigint := 4611686018427387904; -- 2^62
BEGIN
    IF algorithm <> 5 THEN
        most := 2251799813685248 * CASE WHEN algorithm = 3 THEN least(refill, 2048) ELSE 2048 END / span_us;
    END IF;
    RETURN CASE WHEN max_count <= most / 11 THEN 10 * max_count ELSE most - max_count END;
END
$$;

-- _rate_limit_chargeable returns the largest charge that a row accepts. The row is rolled forward to the present time.
CREATE FUNCTION _rate_limit_chargeable(
    algorithm smallint, count bigint, credit bigint, scale bigint, max_count bigint, span_us bigint, refill bigint
) RETURNS bigint LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    owed CONSTANT bigint := _rate_limit_max_owed(algorithm, max_count, span_us, refill);
BEGIN
    RETURN credit + greatest(
        max_count + owed - CASE WHEN algorithm = 3 THEN _rate_limit_ceil_div(count, scale) ELSE count END, 0);
END
$$;

-- _rate_limit_owed returns how many units above its limit a row counts.
CREATE FUNCTION _rate_limit_owed(algorithm smallint, count bigint, scale bigint, max_count bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT greatest(CASE WHEN algorithm = 3 THEN _rate_limit_ceil_div(count, scale) ELSE count END - max_count, 0)
$$;

-- _rate_limit_lasts returns how many microseconds a take, a charge or a grant keeps a row. count is the row's count
-- after it. A bucket that owes is kept until it is full again.
CREATE FUNCTION _rate_limit_lasts(
    algorithm smallint, count bigint, max_count bigint, span_us bigint, refill bigint
) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN algorithm = 3 THEN _rate_limit_ceil_div(greatest(max_count * span_us, count), refill)
        WHEN algorithm IN (2, 5) THEN 2 * span_us ELSE span_us END
$$;

-- _rate_limit_charge counts asked * cost units in a row, if the row accepts such a charge. If another row of the
-- request does not, most is 0, and nothing is counted. retry_after_us is the time until a cost of 1 fits.
CREATE FUNCTION _rate_limit_charge(
    s rate_limit_row, algorithm smallint, clock bigint, cost bigint, asked bigint, most bigint,
    max_count bigint, span_us bigint, refill bigint, zone text
) RETURNS rate_limit_row LANGUAGE plpgsql AS $$
BEGIN
    s := _rate_limit_step(
        s, algorithm, clock, 0::bigint, 1::bigint, 0::bigint, max_count, span_us, refill, zone);
    s.told_log := NULL;
    -- The comparison divides, because the product could overflow.
    IF most >= asked AND asked <= _rate_limit_chargeable(
        algorithm, s.count, s.credit, s.scale, max_count, span_us, refill) / cost
    THEN
        s := _rate_limit_count(s, algorithm, clock, asked * cost, max_count, span_us, refill, zone);
        s.granted := asked;
    END IF;
    RETURN s;
END
$$;

-- _rate_limit_count counts units in a row, whether they fit or not. s is the answer of _rate_limit_step to a look.
CREATE FUNCTION _rate_limit_count(
    s rate_limit_row, algorithm smallint, clock bigint, units bigint,
    max_count bigint, span_us bigint, refill bigint, zone text
) RETURNS rate_limit_row LANGUAGE plpgsql AS $$
DECLARE
    t CONSTANT bigint := greatest(clock, s.window_start);
    -- what is paid with granted credit
    spent CONSTANT bigint := least(greatest(units - (s.remaining - s.credit), 0), s.credit);
BEGIN
    units := units - spent;
    s.credit := s.credit - spent;
    s.count := s.count + units * CASE WHEN algorithm = 3 THEN s.scale ELSE 1 END;
    IF algorithm = 4 AND units > 0 THEN
        s.log := _rate_limit_log_with(s.log, t, units);
        s.window_start := t;
    END IF;
    s.expires_at := t + _rate_limit_lasts(algorithm, s.count, max_count, span_us, refill);
    s := _rate_limit_step(
        s, algorithm, clock, 0::bigint, 1::bigint, 0::bigint, max_count, span_us, refill, zone);
    s.expires_at := clock + s.reset_after_us;
    s.spent := spent;
    s.changed := true;
    s.told_log := NULL;
    RETURN s;
END
$$;
