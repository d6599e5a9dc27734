-- The first two tables have the state of all keys. They have the same columns. They differ only in what happens to them
-- when the server crashes.
--
-- Times are whole microseconds since 1970-01-01 00:00 UTC, so all arithmetic is exact integer arithmetic.
-- to_timestamp(expires_at / 1e6) makes one readable.
--
-- The primary key is the only index, on purpose. An index on a column that changes with every update, such as
-- expires_at, would prevent HOT updates and bloat the table.
--
-- key is the first column, because keys differ more often than prefixes, so nearly every comparison ends with it. In
-- the other order, a batch of 64 keys took a tenth more of the server's instructions. In return, listing the keys of a
-- small limiter reads the whole table: a million rows in about 0.2 s. Only people do that.
--
-- Pages are filled to half. So the updates that follow a row's insertion find room on the same page. Measured with
-- 100,000 keys, against a fillfactor of 90: all updates of new rows are HOT, instead of two fifths. The table is no
-- larger, and a decision in a batch of 256 costs the server 10 to 15 % less.
--
-- A row with a NULL needs 8 more bytes for the null bitmap. So log is NULL where it is not needed, and so are the
-- columns that only buckets need. Then a window's row has the same size as without these columns: 88 bytes with a key
-- of 10 bytes. A calendar window's row has 96 bytes, and a bucket's 128.
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

-- A log of more than 2 kB, about 250 entries, is stored outside its row, uncompressed. Compressing a log of 1,000
-- entries would save a quarter of its 8 kB, but a decision would take 555 us of the server's CPU instead of 125 us.
ALTER TABLE rate_limit_ephemeral ALTER COLUMN log SET STORAGE EXTERNAL;

COMMENT ON TABLE rate_limit_ephemeral IS
    'Limits for abuse protection. Unlogged: fast, and empty again after a crash of the server.';
COMMENT ON COLUMN rate_limit_ephemeral.prefix IS 'Name of the limiter. It keeps limiters apart.';
COMMENT ON COLUMN rate_limit_ephemeral.key IS 'Who is limited: 1 to 512 bytes.';
COMMENT ON COLUMN rate_limit_ephemeral.algorithm IS
    'Which function wrote the row: 1 fixed window, 2 sliding window, 3 token bucket, 4 sliding log, 5 calendar window. '
    'For the other functions the row counts as no row.';
COMMENT ON COLUMN rate_limit_ephemeral.count IS
    'Windows: the units taken in the window that starts at window_start. '
    'Sliding window log: the sum of the log. '
    'Token bucket: granted tokens, above the capacity.';
COMMENT ON COLUMN rate_limit_ephemeral.prev_count IS
    'Sliding window: the units taken in the previous window.';
COMMENT ON COLUMN rate_limit_ephemeral.window_start IS
    'Windows: start of the window; for a calendar window, the time of the first take in it. '
    'Sliding window log: the time of the last take. '
    'Token bucket: the time up to which refill is part of credit. '
    'In microseconds since 1970 UTC.';
COMMENT ON COLUMN rate_limit_ephemeral.credit IS
    'Token bucket: the tokens left, in units of 1/scale token. '
    'Windows: granted credit, above the limit.';
COMMENT ON COLUMN rate_limit_ephemeral.scale IS
    'Token bucket: units of credit in one token, which is the policy''s refill interval in microseconds. '
    'Calendar window: microseconds from window_start to the end of the window. '
    'Otherwise NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.expires_at IS
    'From this time on the row means the same as no row. In microseconds since 1970 UTC: '
    'to_timestamp(expires_at / 1e6).';
COMMENT ON COLUMN rate_limit_ephemeral.log IS
    'Sliding window log: the takes, with the oldest first. '
    'Each entry is the time in microseconds since 1970 UTC * 1024 + the units: '
    'to_timestamp((entry >> 10) / 1e6), entry & 1023. '
    'Token bucket: the start of the current 128th of the time in which it fills, '
    'the tokens that processes have leased in it, and those that they had leased in the one before; '
    'NULL if they have leased none. '
    'Otherwise NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.since IS
    'Tells a refund whether the row is still the same. '
    'Token bucket: the time since which all takes count, in microseconds since 1970 UTC. '
    'Otherwise: when credit was first granted, or NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.capacity IS 'Token bucket: the policy''s capacity. Otherwise NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.refill IS 'Token bucket: the policy''s refill. Otherwise NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.returned IS
    'Token bucket: the sum of all refunds since the time in since, in units of 1/scale token. Otherwise NULL.';

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
    'Limits for quotas and billing. Logged: kept after a crash of the server. '
    'For the columns, see the comments on those of rate_limit_ephemeral.';

-- How far the sweeper has come: see sweep.sql.
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
COMMENT ON COLUMN rate_limit_sweeper.held_by IS 'Whose pass it is. NULL if any sweeper may continue it.';
COMMENT ON COLUMN rate_limit_sweeper.held_at IS
    'When a batch was last swept. 10 seconds later any sweeper may continue.';
COMMENT ON COLUMN rate_limit_sweeper.completed_at IS 'When a pass last reached the end of both tables.';

-- Policies in the database: see policies.sql.
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
    'Policies for keys, for limiters that read them. '
    'A row for the exact key comes first, then one for the longest prefix, then one for all keys, '
    'then the policy in the code. '
    'Of several rows for the same keys, the one that began last counts.
Example: INSERT INTO rate_limit_policy (name, key, policy, comment)
    VALUES (''api'', ''customer:42'', ''sliding 5000/1m'', ''contract of 2026, ticket 1234'')';
COMMENT ON COLUMN rate_limit_policy.id IS 'Identifies the row, also in the history.';
COMMENT ON COLUMN rate_limit_policy.name IS 'Name of the limiter.';
COMMENT ON COLUMN rate_limit_policy.key IS 'The key that the row is for. NULL: see key_prefix.';
COMMENT ON COLUMN rate_limit_policy.key_prefix IS
    'The row is for keys with this prefix. If this and key are NULL, it is for all keys of the limiter.';
COMMENT ON COLUMN rate_limit_policy.mode IS
    'enforce: the policy decides. '
    'shadow: the policy decides too, but its decisions are only reported. '
    'off: everything is allowed, and nothing counted. '
    'deny: everything is denied, until valid_until.';
COMMENT ON COLUMN rate_limit_policy.policy IS
    'The policy of enforce and shadow, such as sliding 100/1m. rate_limit_allow explains the text.';
COMMENT ON COLUMN rate_limit_policy.valid_from IS 'The row counts from this time on.';
COMMENT ON COLUMN rate_limit_policy.valid_until IS 'The row counts until this time; infinity if it has no end.';
COMMENT ON COLUMN rate_limit_policy.comment IS 'The reason. It is required.';
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
    'Old rows may be deleted. Keep the last one: processes compare its version with their own.';
COMMENT ON COLUMN rate_limit_policy_history.version IS 'Number of the change, in ascending order.';
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
    'The decisions of policies of the mode shadow, which processes report every 10 seconds. '
    'A row for each policy, and for each of the up to 1000 keys with the most denials.';
COMMENT ON COLUMN rate_limit_shadow.key IS 'The key; empty for all keys together.';
COMMENT ON COLUMN rate_limit_shadow.decided IS 'How many requests were decided; 0 for a single key.';
COMMENT ON COLUMN rate_limit_shadow.denied IS 'How many of them the policy in force has denied.';
COMMENT ON COLUMN rate_limit_shadow.would_deny IS 'How many of them this policy would have denied.';
