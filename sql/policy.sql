-- _rate_limit_read_policy parses the text of a policy, such as "sliding 10/1m", or of several policies separated by
-- commas. ParsePolicy of the Go package accepts the same texts (TestSQLReadsPoliciesAsGoDoes). Only other functions
-- call a function whose name begins with _rate_limit_.
CREATE FUNCTION _rate_limit_read_policy(
    policy text, OUT algorithms smallint[], OUT limits bigint[], OUT spans_us bigint[], OUT refills bigint[],
    OUT zones text[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
    -- Convert the text to ASCII, so that the result does not depend on the database's encoding. Each byte of another
    -- character in UTF-8 becomes a ~ and three octal digits. A ~ in the text becomes a !, because no valid policy has a
    -- !.
    ascii text := translate(encode(convert_to(policy, 'UTF8'), 'escape'), chr(92) || '~', '~!');
    one text;
    concurrent text; -- the limit of "concurrent 5"
    words text[];   -- words of one policy: algorithm, capacity of a bucket, amount, duration or unit, time zone
    parts text[];   -- parts of the duration: days, and the rest
    of_unit text;   -- the duration of a unit of the calendar
    term text[];    -- one term of the duration: whole number, fraction, unit
    unit bigint;    -- nanoseconds
    span numeric;   -- nanoseconds
    fraction numeric;
    scale double precision;
    digit text;
    algorithm smallint;
    max_count bigint;
    window_us bigint;
    refill bigint;
    zone text;
    biggest CONSTANT numeric := 9223372036854775807;
    number CONSTANT text := '[+]?0*[0-9]{1,19}';
    terms CONSTANT text := '([0-9]+[.]?[0-9]*|[.][0-9]+)(ns|us|ms|s|m|h)';
BEGIN
    ascii := regexp_replace(ascii, '(~302~265|~316~274)s', 'us', 'g'); -- both characters for micro, in UTF-8
    -- These are the white space characters of Go's unicode.IsSpace.
    ascii := regexp_replace(ascii, '([[:space:]]|~302~205|~302~240|~341~232~200'
        '|~342~200~2(0[0-7]|1[0-2]|5[017])|~342~201~237|~343~200~200)+', ' ', 'g');
    FOREACH one IN ARRAY regexp_split_to_array(coalesce(ascii, ''), ',') LOOP
        words := regexp_match(one, '^ ?([a-z]+) (?:(' || number || ') )?(' || number || ')/([^ ]+)(?: ([^ ]+))? ?$');
        concurrent := (regexp_match(one, '^ ?concurrent (' || number || ') ?$'))[1];
        algorithm := CASE
            WHEN words[1] = 'fixed' AND words[2] IS NULL AND words[5] IS NULL THEN 1
            WHEN words[1] = 'sliding' AND words[2] IS NULL AND words[5] IS NULL THEN 2
            WHEN words[1] = 'bucket' AND words[2] IS NOT NULL AND words[5] IS NULL THEN 3
            WHEN words[1] = 'log' AND words[2] IS NULL AND words[5] IS NULL THEN 4
            WHEN words[1] = 'every' AND words[2] IS NULL THEN 5
        END;
        zone := NULL;
        IF algorithm = 5 THEN
            of_unit := CASE words[4] WHEN 'minute' THEN '1m' WHEN 'hour' THEN '1h' WHEN 'day' THEN '1d'
                WHEN 'week' THEN '7d' WHEN 'month' THEN '31d' END;
            IF of_unit IS NULL AND words[5] IS NULL THEN -- windows that are aligned to the epoch
                zone := 'epoch';
            ELSE
                zone := coalesce(words[5], 'UTC');
                words[4] := CASE WHEN zone <> 'epoch' THEN of_unit END;
            END IF;
        END IF;
        IF concurrent IS NOT NULL THEN
            algorithm := 6;
            words := ARRAY['concurrent', NULL, concurrent, '0', NULL];
        END IF;
        parts := regexp_match(words[4], '^(?:0*([0-9]{1,6})d)?(.*)$');
        IF (algorithm IS NOT NULL
                AND words[3]::numeric <= biggest AND coalesce(words[2]::numeric, 1) <= biggest
                AND CASE WHEN algorithm = 6 THEN true
                    WHEN parts[1] IS NULL THEN parts[2] ~ concat('^[+]?(', terms, ')+$')
                    ELSE parts[2] ~ concat('^(0|(', terms, ')*)$') END) IS NOT TRUE
        THEN
            RAISE EXCEPTION 'rate_limit: policy cannot be read'
                USING ERRCODE = 'invalid_parameter_value', COLUMN = 'policy',
                    HINT = 'Write "fixed 100/1m", "sliding 100/1m", "bucket 20 5/10s", "log 100/1m", '
                        '"every 1000/month Europe/Berlin", "every 100/1m", "concurrent 5", or several of these with '
                        'commas between them. '
                        'A duration has units: 10s, 1m, 1h30m, 30d. '
                        'A window of the calendar is a minute, hour, day, week or month.';
        END IF;
        span := coalesce(parts[1]::numeric, 0) * 86400000000000;
        FOR term IN SELECT regexp_matches(parts[2], '([0-9]*)[.]?([0-9]*)([^.0-9+]+)', 'g') LOOP
            unit := CASE term[3] WHEN 'h' THEN 3600000000000 WHEN 'm' THEN 60000000000 WHEN 's' THEN 1000000000
                WHEN 'ms' THEN 1000000 WHEN 'ns' THEN 1 ELSE 1000 END;
            span := span + CASE WHEN length(ltrim(term[1], '0')) > 19 THEN biggest * 1000
                ELSE concat('0', term[1])::numeric * unit END;
            -- Compute the fraction in floating point, as time.ParseDuration does, with as many digits as fit into a
            -- bigint. Digits after the 40th are less than a nanosecond.
            fraction := 0;
            scale := 1;
            FOREACH digit IN ARRAY regexp_split_to_array(left(term[2], 40), '') LOOP
                EXIT WHEN digit = '' OR fraction * 10 + digit::numeric > biggest + 1;
                fraction := fraction * 10 + digit::numeric;
                scale := scale * 10;
            END LOOP;
            span := span + trunc(fraction::double precision * (unit::double precision / scale))::bigint;
        END LOOP;
        max_count := coalesce(words[2], words[3])::bigint;
        refill := CASE WHEN words[2] IS NULL THEN 0 ELSE words[3]::bigint END;
        window_us := CASE WHEN span % 1000 = 0 AND span / 1000 <= biggest THEN span / 1000 END;
        IF _rate_limit_valid(algorithm, max_count, window_us, refill, zone) IS NOT TRUE
        THEN
            RAISE EXCEPTION 'rate_limit: policy is outside the exact range'
                USING ERRCODE = 'invalid_parameter_value', COLUMN = 'policy',
                    HINT = 'Each number is at least 1. A duration is whole microseconds, and at most 71 years. '
                        'The limit of a log is at most 1000. Other limits multiplied by their duration are at most '
                        '2^62 microseconds. A bucket is full after 71 years at most. '
                        'At most 1000000 can be concurrent. '
                        'A time zone is UTC or a name like Europe/Berlin.';
        END IF;
        algorithms := algorithms || algorithm;
        limits := limits || max_count;
        spans_us := spans_us || window_us;
        refills := refills || refill;
        zones := zones || zone;
    END LOOP;
    IF cardinality(algorithms) > 8 THEN
        RAISE EXCEPTION 'rate_limit: policy has % parts with commas between them', cardinality(algorithms)
            USING ERRCODE = 'invalid_parameter_value', COLUMN = 'policy', HINT = 'It may have at most 8.';
    END IF;
END
$$;
