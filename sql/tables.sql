-- The first two tables hold every limit. Their columns are the same and mean the same. They differ only in what a crash
-- of the server does to them.
--
-- Times are whole microseconds since 1970-01-01 00:00 UTC, so all arithmetic on them is exact integer arithmetic.
-- to_timestamp(expires_at / 1e6) shows one to a person.
--
-- The primary key is the only index, on purpose. With an index on a column that every update changes, such as
-- expires_at, no update would be HOT, and the table would bloat.
--
-- key stands first in it, because keys differ where prefixes do not, so nearly each comparison ends with the first
-- column. The other way round, a batch of 64 keys took a tenth more of the server's instructions. In return, to list
-- the keys of a small limiter is to read the whole table, a million rows in about 0.2 s. Only people ask for that.
--
-- A page is filled by half. So the update that follows a row's insertion, and those after it, find room on its page.
-- Measured with 100,000 keys, against a fillfactor of 90: all updates of new rows are HOT rather than two fifths of
-- them, the table is no larger, and a decision in a batch of 256 costs the server 10 to 15 % less.
--
-- A row in which something is NULL needs 8 bytes more, to say what. So log is NULL where it is not needed, and so are
-- the columns that only buckets need. Then a window's row is as large as it would be without these columns: 88 bytes
-- with a key of 10 bytes. A calendar window's row has 96 bytes, and a bucket's 128.
CREATE UNLOGGED TABLE rate_limit_ephemeral (
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
    CONSTRAINT rate_limit_ephemeral_pkey PRIMARY KEY (key, prefix)
) WITH (fillfactor = 50);

-- A log of more than 2 kB, about 250 entries, is stored outside its row and is not compressed. Compressing a log of
-- 1,000 entries would save a quarter of its 8 kB, but a decision would cost 555 us of the server's CPU instead of
-- 125 us.
ALTER TABLE rate_limit_ephemeral ALTER COLUMN log SET STORAGE EXTERNAL;

COMMENT ON TABLE rate_limit_ephemeral IS
    'Limits for abuse protection. Unlogged: fast, and empty again after a crash of the server.';
COMMENT ON COLUMN rate_limit_ephemeral.prefix IS 'Name of the limiter. It keeps limiters apart.';
COMMENT ON COLUMN rate_limit_ephemeral.key IS 'Who is limited: 1 to 512 bytes.';
COMMENT ON COLUMN rate_limit_ephemeral.algorithm IS
    'Which function wrote the row: 1 fixed window, 2 sliding window, 3 token bucket, 4 sliding log, 5 calendar window. '
    'For the other functions the row counts as no row.';
COMMENT ON COLUMN rate_limit_ephemeral.count IS
    'Windows: what has been taken in the window that starts at window_start. '
    'Sliding window log: the sum of the log. '
    'Token bucket: granted tokens, above the capacity.';
COMMENT ON COLUMN rate_limit_ephemeral.prev_count IS
    'Sliding window: what had been taken in the window before that one.';
COMMENT ON COLUMN rate_limit_ephemeral.window_start IS
    'Windows: start of the window; of a calendar window, when something was first taken in it. '
    'Sliding window log: when something was last taken. '
    'Token bucket: the time up to which refill is part of credit. '
    'In microseconds since 1970 UTC.';
COMMENT ON COLUMN rate_limit_ephemeral.credit IS
    'Token bucket: what is left, in units of 1/scale token. '
    'Windows: granted credit, above the limit.';
COMMENT ON COLUMN rate_limit_ephemeral.scale IS
    'Token bucket: units of credit in one token, which is the policy''s refill interval in microseconds. '
    'Calendar window: microseconds from window_start to the end of the window. '
    'Otherwise NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.expires_at IS
    'From this time on the row means the same as no row. In microseconds since 1970 UTC: '
    'to_timestamp(expires_at / 1e6).';
COMMENT ON COLUMN rate_limit_ephemeral.log IS
    'Sliding window log: what has been taken, oldest first. '
    'Each entry is the time in microseconds since 1970 UTC * 1024 + the units: '
    'to_timestamp((entry >> 10) / 1e6), entry & 1023. '
    'Token bucket: the start of the current 128th of the time in which it fills, '
    'the tokens that processes have leased in it, and those that they had leased in the one before; '
    'NULL if they have leased none. '
    'Otherwise NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.since IS
    'Tells a refund whether the row is still the one that was taken from. '
    'Token bucket: the time since which all that was taken counts, in microseconds since 1970 UTC. '
    'Otherwise: when credit was first granted, or NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.capacity IS 'Token bucket: the policy''s capacity. Otherwise NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.refill IS 'Token bucket: the policy''s refill. Otherwise NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.returned IS
    'Token bucket: what refunds have given back since the time in since, in units of 1/scale token. Otherwise NULL.';

-- Its twin. Only the first line differs. (LIKE would be shorter, but event triggers that harden tables see it twice.)
CREATE TABLE rate_limit_durable (
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
    CONSTRAINT rate_limit_durable_pkey PRIMARY KEY (key, prefix)
) WITH (fillfactor = 50);

ALTER TABLE rate_limit_durable ALTER COLUMN log SET STORAGE EXTERNAL;

COMMENT ON TABLE rate_limit_durable IS
    'Limits for quotas and billing. Logged: kept over a crash of the server. '
    'The comments on the columns of rate_limit_ephemeral hold for these too.';

-- How far the sweeper is: sweep.sql.
CREATE TABLE rate_limit_sweeper (
    one          boolean NOT NULL DEFAULT true,
    durable      boolean NOT NULL DEFAULT false,
    next_page    bigint NOT NULL DEFAULT 0,
    held_by      text,
    held_at      timestamptz,
    completed_at timestamptz,
    CONSTRAINT rate_limit_sweeper_pkey PRIMARY KEY (one),
    CONSTRAINT rate_limit_sweeper_one CHECK (one)
);

COMMENT ON TABLE rate_limit_sweeper IS
    'Where the sweeper is: the table and the page that it reads next. It has one row, which the first sweep makes.';
COMMENT ON COLUMN rate_limit_sweeper.held_by IS 'Whose pass it is. NULL if anybody may go on with it.';
COMMENT ON COLUMN rate_limit_sweeper.held_at IS 'When a batch was last swept. 10 seconds later anybody may go on.';
COMMENT ON COLUMN rate_limit_sweeper.completed_at IS 'When a pass last reached the end of both tables.';

-- Policies as data: policies.sql.
CREATE TABLE rate_limit_policy (
    id          bigint NOT NULL GENERATED ALWAYS AS IDENTITY,
    name        text COLLATE "C" NOT NULL,
    key         text COLLATE "C",
    key_prefix  text COLLATE "C",
    mode        text NOT NULL DEFAULT 'enforce',
    policy      text,
    valid_from  timestamptz NOT NULL DEFAULT now(),
    valid_until timestamptz NOT NULL DEFAULT 'infinity',
    comment     text NOT NULL,
    automatic   boolean NOT NULL DEFAULT false,
    changed_by  text NOT NULL DEFAULT session_user,
    changed_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT rate_limit_policy_pkey PRIMARY KEY (id)
);

CREATE INDEX rate_limit_policy_target ON rate_limit_policy (name, key, key_prefix);

CREATE INDEX rate_limit_policy_bans ON rate_limit_policy (name, valid_until) WHERE automatic;

COMMENT ON TABLE rate_limit_policy IS
    'Which policy holds for whom, for limiters that obey it. '
    'An exact key comes before the longest prefix, that before everybody, and that before the policy in the code. '
    'Of several rows for the same, the one that began last counts.
Example: INSERT INTO rate_limit_policy (name, key, policy, comment)
    VALUES (''api'', ''customer:42'', ''sliding 5000/1m'', ''contract of 2026, ticket 1234'')';
COMMENT ON COLUMN rate_limit_policy.id IS 'Tells rows apart, also in the history.';
COMMENT ON COLUMN rate_limit_policy.name IS 'Name of the limiter.';
COMMENT ON COLUMN rate_limit_policy.key IS 'The key that the row is for. NULL: see key_prefix.';
COMMENT ON COLUMN rate_limit_policy.key_prefix IS
    'What the keys begin with that the row is for. NULL, and key NULL too: all keys of the limiter.';
COMMENT ON COLUMN rate_limit_policy.mode IS
    'enforce: the policy decides. '
    'shadow: it is decided too, and only reported. '
    'off: everything is allowed, and nothing counted. '
    'deny: everything is denied, until valid_until.';
COMMENT ON COLUMN rate_limit_policy.policy IS
    'The policy of enforce and shadow, such as sliding 100/1m. rate_limit_allow explains the text.';
COMMENT ON COLUMN rate_limit_policy.valid_from IS 'From when on the row counts.';
COMMENT ON COLUMN rate_limit_policy.valid_until IS 'Until when the row counts; infinity if it has no end.';
COMMENT ON COLUMN rate_limit_policy.comment IS 'Why. It is required.';
COMMENT ON COLUMN rate_limit_policy.automatic IS 'Whether rate_limit_ban has made the row.';
COMMENT ON COLUMN rate_limit_policy.changed_by IS 'Who last changed the row: the role that logged in.';
COMMENT ON COLUMN rate_limit_policy.changed_at IS 'When the row was last changed.';

CREATE TABLE rate_limit_policy_history (
    version   bigint NOT NULL GENERATED ALWAYS AS IDENTITY,
    at        timestamptz NOT NULL,
    by        text NOT NULL,
    action    text NOT NULL,
    policy_id bigint NOT NULL,
    before    jsonb,
    after     jsonb,
    CONSTRAINT rate_limit_policy_history_pkey PRIMARY KEY (version)
);

COMMENT ON TABLE rate_limit_policy_history IS
    'Every change of rate_limit_policy, in the order of the commits. '
    'Old rows may be deleted. Keep the last one: processes compare its version with what they know.';
COMMENT ON COLUMN rate_limit_policy_history.version IS 'Number of the change. It ascends.';
COMMENT ON COLUMN rate_limit_policy_history.by IS 'Who made it: the role that logged in.';
COMMENT ON COLUMN rate_limit_policy_history.action IS 'insert, update or delete.';
COMMENT ON COLUMN rate_limit_policy_history.before IS 'The row before the change. NULL if there was none.';
COMMENT ON COLUMN rate_limit_policy_history.after IS 'The row after the change. NULL if it was deleted.';

CREATE TABLE rate_limit_shadow (
    policy_id  bigint NOT NULL,
    key        text COLLATE "C" NOT NULL,
    decided    bigint NOT NULL,
    denied     bigint NOT NULL,
    would_deny bigint NOT NULL,
    first_at   timestamptz NOT NULL,
    last_at    timestamptz NOT NULL,
    CONSTRAINT rate_limit_shadow_pkey PRIMARY KEY (policy_id, key)
);

COMMENT ON TABLE rate_limit_shadow IS
    'What policies of the mode shadow would have decided, as the processes report it every 10 seconds. '
    'A row for each policy, and one for each of the up to 1000 keys that it would have denied most.';
COMMENT ON COLUMN rate_limit_shadow.key IS 'Which key; empty for all keys together.';
COMMENT ON COLUMN rate_limit_shadow.decided IS 'How many requests were decided; 0 for a single key.';
COMMENT ON COLUMN rate_limit_shadow.denied IS 'How many of them the policy in force has denied.';
COMMENT ON COLUMN rate_limit_shadow.would_deny IS 'How many of them this policy would have denied.';
