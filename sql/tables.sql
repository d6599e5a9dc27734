-- The two tables that hold every limit. Their columns are the same and mean the same. They differ only in what a crash
-- of the server does to them.
--
-- Times are whole microseconds since 1970-01-01 00:00 UTC, so all arithmetic on them is exact integer arithmetic.
-- to_timestamp(expires_at / 1e6) shows one to a person.
--
-- The primary key is the only index, on purpose. With an index on a column that every update changes, such as
-- expires_at, no update would be HOT, and the table would bloat.
--
-- key stands first in it, because keys differ where prefixes do not, so nearly each comparison ends with the first
-- column. The other way round, a batch of 64 keys took a tenth more of the server's instructions (100,000 rows of one
-- limiter, callgrind). In return, to list the keys of a small limiter is to read the whole table, a million rows in
-- about 0.2 s. Only people ask for that.
--
-- A page is filled by half. So the update that follows a row's insertion, and those after it, find room on its page.
-- Measured with 100,000 keys, against a fillfactor of 90: all updates of new rows are HOT rather than two fifths of
-- them. The table is no larger, 20 MB both times, because at 90 the second versions of rows went to further pages. A
-- decision in a batch of 256 costs the server 10 to 15 % less, because pages need pruning less often.
--
-- A row in which something is NULL needs 8 bytes more, to say what. So log is NULL where it is not needed, and so are
-- the columns that only buckets need. Then a window's row is as large as it would be without these columns: 88 bytes
-- with a key of 10 bytes. A calendar window's row has 96 bytes, and a bucket's 128.

{{- range .Tables}}
CREATE {{.Kind}} rate_limit_{{.Name}} (
    prefix       text COLLATE "C" NOT NULL,
    key          text COLLATE "C" NOT NULL,
    algorithm    smallint NOT NULL DEFAULT 0,
    count        bigint NOT NULL DEFAULT 0,
    prev_count   bigint NOT NULL DEFAULT 0,
    window_start bigint NOT NULL DEFAULT 0,
    credit       bigint NOT NULL DEFAULT 0,
    scale        bigint,
    expires_at   bigint NOT NULL DEFAULT 0,
    log          bigint[],
    since        bigint,
    capacity     bigint,
    refill       bigint,
    returned     bigint,
    CONSTRAINT rate_limit_{{.Name}}_pkey PRIMARY KEY (key, prefix)
) WITH (fillfactor = 50);

-- A log of more than 2 kB, about 250 entries, is stored outside its row and is not compressed. Compressing a log of
-- 1,000 entries would save a quarter of its 8 kB, but a decision would cost 555 us of the server's CPU instead of
-- 125 us.
ALTER TABLE rate_limit_{{.Name}} ALTER COLUMN log SET STORAGE EXTERNAL;

COMMENT ON TABLE rate_limit_{{.Name}} IS
    '{{.Comment}}';
COMMENT ON COLUMN rate_limit_{{.Name}}.prefix IS 'Name of the limiter. It keeps limiters apart.';
COMMENT ON COLUMN rate_limit_{{.Name}}.key IS 'Who is limited: 1 to 512 bytes.';
COMMENT ON COLUMN rate_limit_{{.Name}}.algorithm IS
    'Which function wrote the row: {{include "codes" $.Algorithms}}. '
    'For the other functions the row counts as no row.';
COMMENT ON COLUMN rate_limit_{{.Name}}.count IS
    'Windows: what has been taken in the window that starts at window_start. '
    'Sliding window log: the sum of the log. '
    'Token bucket: granted tokens, above the capacity.';
COMMENT ON COLUMN rate_limit_{{.Name}}.prev_count IS
    'Sliding window: what had been taken in the window before that one.';
COMMENT ON COLUMN rate_limit_{{.Name}}.window_start IS
    'Windows: start of the window; of a calendar window, when something was first taken in it. '
    'Sliding window log: when something was last taken. '
    'Token bucket: the time up to which refill is part of credit. '
    'In microseconds since 1970 UTC.';
COMMENT ON COLUMN rate_limit_{{.Name}}.credit IS
    'Token bucket: what is left, in units of 1/scale token. '
    'Windows: granted credit, above the limit.';
COMMENT ON COLUMN rate_limit_{{.Name}}.scale IS
    'Token bucket: units of credit in one token, which is the policy''s refill interval in microseconds. '
    'Calendar window: microseconds from window_start to the end of the window. '
    'Otherwise NULL.';
COMMENT ON COLUMN rate_limit_{{.Name}}.expires_at IS
    'From this time on the row means the same as no row. In microseconds since 1970 UTC: '
    'to_timestamp(expires_at / 1e6).';
COMMENT ON COLUMN rate_limit_{{.Name}}.log IS
    'Sliding window log: what has been taken, oldest first. '
    'Each entry is the time in microseconds since 1970 UTC * 1024 + the units: '
    'to_timestamp((entry >> 10) / 1e6), entry & 1023. '
    'Token bucket: the start of the current 128th of the time in which it fills, '
    'the tokens that processes have leased in it, and those that they had leased in the one before; '
    'NULL if they have leased none. '
    'Otherwise NULL.';
COMMENT ON COLUMN rate_limit_{{.Name}}.since IS
    'Tells a refund whether the row is still the one that was taken from. '
    'Token bucket: the time since which all that was taken counts, in microseconds since 1970 UTC. '
    'Otherwise: when credit was first granted, or NULL.';
COMMENT ON COLUMN rate_limit_{{.Name}}.capacity IS 'Token bucket: the policy''s capacity. Otherwise NULL.';
COMMENT ON COLUMN rate_limit_{{.Name}}.refill IS 'Token bucket: the policy''s refill. Otherwise NULL.';
COMMENT ON COLUMN rate_limit_{{.Name}}.returned IS
    'Token bucket: what refunds have given back since the time in since, in units of 1/scale token. Otherwise NULL.';
{{end -}}
