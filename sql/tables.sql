-- The tables rate_limit_ephemeral and rate_limit_durable have the state of all keys. Both tables have the same columns.
-- After a crash of the server, rate_limit_ephemeral is empty, and rate_limit_durable is not.
--
-- Times are whole microseconds since 1970-01-01 00:00 UTC, so that all arithmetic is exact. to_timestamp(expires_at /
-- 1e6) makes a time readable.
--
-- The primary key is the only index. An index on a column that changes with every update, such as expires_at, would
-- prevent HOT updates and bloat the table.
--
-- key is the first column of the primary key, because keys differ more often than prefixes. So Postgres rarely has to
-- compare prefixes. In the other order, a batch of 64 keys took a tenth more instructions of the server. In return,
-- listing the keys of a limiter reads the whole table: 0.2 s for a million rows. Only people list keys.
--
-- Pages are filled to half, so that updates of a row find room on the row's page. Measured with 100,000 keys: with a
-- fillfactor of 50, all updates of new rows are HOT; with a fillfactor of 90, only two fifths. The table is not larger,
-- and a decision in a batch of 256 costs the server 10 to 15 % less.
--
-- A row that has a NULL needs 8 more bytes for the null bitmap. So all columns that some algorithms do not need are
-- NULL in their rows. With a key of 10 bytes, the row of a fixed or sliding window has 88 bytes, the row of a calendar
-- window 96, and the row of a bucket 128.
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
    held         bigint,
    held_next    bigint,
    held_until   bigint,
    CONSTRAINT rate_limit_ephemeral_pkey PRIMARY KEY (key, prefix)
) WITH (fillfactor = 50);

-- Postgres stores a log of more than 2 kB (about 250 entries) outside of its row, and EXTERNAL prevents compression.
-- Compressing a log of 1,000 entries would save 2 of its 8 kB, but a decision would take 555 us of CPU instead of 125.
ALTER TABLE rate_limit_ephemeral ALTER COLUMN log SET STORAGE EXTERNAL;

COMMENT ON TABLE rate_limit_ephemeral IS
    'Limits for abuse protection. Unlogged: fast, and empty again after a crash of the server.';
COMMENT ON COLUMN rate_limit_ephemeral.prefix IS 'Name of the limiter. Limiters with different names share no rows.';
COMMENT ON COLUMN rate_limit_ephemeral.key IS 'The limited user, address or other thing: 1 to 512 bytes.';
COMMENT ON COLUMN rate_limit_ephemeral.algorithm IS
    'Which function wrote the row: 1 fixed window, 2 sliding window, 3 token bucket, 4 sliding log, 5 calendar window. '
    'For functions of other algorithms, the row counts as no row.';
COMMENT ON COLUMN rate_limit_ephemeral.count IS
    'Windows: the units taken in the window that starts at window_start. '
    'Sliding window log: the sum of the log. '
    'Token bucket: the missing tokens, in units of 1/scale token.';
COMMENT ON COLUMN rate_limit_ephemeral.prev_count IS
    'Sliding window: the units taken in the previous window.';
COMMENT ON COLUMN rate_limit_ephemeral.window_start IS
    'Windows: start of the window; for a calendar window, the time of the first take in it. '
    'Sliding window log: the time of the last take. '
    'Token bucket: the time up to which count includes the refill. '
    'In microseconds since 1970 UTC.';
COMMENT ON COLUMN rate_limit_ephemeral.credit IS
    'Granted credit, above the limit.';
COMMENT ON COLUMN rate_limit_ephemeral.scale IS
    'Token bucket: units of count in one token, which is the policy''s refill interval in microseconds. '
    'Calendar window: microseconds from window_start to the end of the window. '
    'Otherwise NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.expires_at IS
    'From this time on the row means the same as no row. In microseconds since 1970 UTC: '
    'to_timestamp(expires_at / 1e6).';
COMMENT ON COLUMN rate_limit_ephemeral.log IS
    'Sliding window log: the takes, with the oldest first. '
    'Each entry is the time in microseconds since 1970 UTC * 1024 + the units: '
    'to_timestamp((entry >> 10) / 1e6), entry & 1023. '
    'Token bucket: the start of the current lease period (1/128 of the time in which the bucket fills), '
    'the tokens leased in this period, and the tokens leased in the previous period; '
    'NULL without leases. '
    'Otherwise NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.since IS
    'Tells a refund whether the row is still the same. '
    'Token bucket: the time since which all takes count, in microseconds since 1970 UTC. '
    'Otherwise: when credit was first granted, or NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.capacity IS 'Token bucket: the policy''s capacity. Otherwise NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.refill IS 'Token bucket: the policy''s refill. Otherwise NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.returned IS
    'Token bucket: the sum of all refunds since the time in since, in units of 1/scale token. Otherwise NULL.';

COMMENT ON COLUMN rate_limit_ephemeral.held IS
    'The sum of the units of the key''s live holds in rate_limit_ephemeral_hold, or NULL if there is none. '
    'A hold that has ended stays in the sum until the next write to the row.';
COMMENT ON COLUMN rate_limit_ephemeral.held_next IS
    'The earliest end of these holds, in microseconds since 1970 UTC. NULL if held is NULL.';
COMMENT ON COLUMN rate_limit_ephemeral.held_until IS
    'The last end of these holds, in microseconds since 1970 UTC. NULL if held is NULL.';

-- This table has the same columns as rate_limit_ephemeral. (With LIKE, event triggers that harden tables would run
-- twice.)
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
    held         bigint,
    held_next    bigint,
    held_until   bigint,
    CONSTRAINT rate_limit_durable_pkey PRIMARY KEY (key, prefix)
) WITH (fillfactor = 50);

ALTER TABLE rate_limit_durable ALTER COLUMN log SET STORAGE EXTERNAL;

COMMENT ON TABLE rate_limit_durable IS
    'Limits for quotas and billing. Logged: kept after a crash of the server. '
    'For the columns, see the comments on those of rate_limit_ephemeral.';

-- The holds of the keys in rate_limit_ephemeral and rate_limit_durable: see hold.sql. A hold of several limits has a
-- row for each of them. A hold changes only in a statement that has locked the row of its key, and this statement also
-- changes held, held_next and held_until in that row. So these columns always agree with the list of live holds.
--
-- Ids are random. If they were counted, an unlogged table could give out an id a second time after a crash.
--
-- Slots of the policy concurrent, and tickets that wait for one, are rows of the same tables: see concurrency.sql.
CREATE UNLOGGED TABLE rate_limit_ephemeral_hold (
    id         uuid NOT NULL,
    prefix     text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL,
    units      bigint NOT NULL,
    ends_at    bigint NOT NULL,
    status     smallint NOT NULL DEFAULT 0,
    used       bigint,
    late       boolean,
    settled_at bigint,
    algorithm  smallint NOT NULL,
    max_count  bigint NOT NULL,
    span_us    bigint NOT NULL,
    refill     bigint NOT NULL,
    zone       text COLLATE "C",
    holder     text,
    line_group text COLLATE "C",
    weight     integer,
    made_at    bigint,
    fence      bigint NOT NULL DEFAULT 0,
    CONSTRAINT rate_limit_ephemeral_hold_pkey PRIMARY KEY (id, key, prefix)
);

CREATE INDEX rate_limit_ephemeral_hold_live ON rate_limit_ephemeral_hold (key, prefix, ends_at) WHERE status = 0;

CREATE INDEX rate_limit_ephemeral_hold_line ON rate_limit_ephemeral_hold (key, prefix, line_group, fence)
    WHERE status = 3;

COMMENT ON TABLE rate_limit_ephemeral_hold IS
    'The holds of the keys in rate_limit_ephemeral. A hold is kept for an hour after it was settled, or for a day '
    'after its end.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.id IS 'The id of the hold. Each limit of the hold has a row with this id.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.prefix IS 'Name of the limiter.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.key IS 'The limited user, address or other thing.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.units IS 'How many units are held.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.ends_at IS
    'From this time on the units are free, in microseconds since 1970 UTC.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.status IS
    '0 live, 1 ended, 2 settled, 3 a ticket that waits for a slot. After ends_at, 0 means that no write to the row of '
    'the key has noted the end yet.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.used IS 'How many units the settlement has counted.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.late IS 'Whether the hold had ended when it was settled.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.settled_at IS
    'When the hold was settled, in microseconds since 1970 UTC.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.algorithm IS
    'The policy that the hold was made with. rate_limit_settle counts by this policy. 6 concurrent: the row is a slot '
    'or a ticket.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.max_count IS
    'The limit of this policy. For a ticket, the limit of the last request that waited in its line.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.holder IS 'Slot or ticket: who it says it is.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.line_group IS
    'Slot or ticket: its group, which may be empty. Free units go to the group that holds least for its weight.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.weight IS 'Slot or ticket: the weight of its group, 1 to 1000.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.made_at IS
    'Slot or ticket: when it was asked for, in microseconds since 1970 UTC.';
COMMENT ON COLUMN rate_limit_ephemeral_hold.fence IS
    'Slot: its fence, which is larger than that of each earlier slot of the key. Ticket: its place in the line. '
    'Other holds: 0.';

CREATE TABLE rate_limit_durable_hold (
    id         uuid NOT NULL,
    prefix     text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL,
    units      bigint NOT NULL,
    ends_at    bigint NOT NULL,
    status     smallint NOT NULL DEFAULT 0,
    used       bigint,
    late       boolean,
    settled_at bigint,
    algorithm  smallint NOT NULL,
    max_count  bigint NOT NULL,
    span_us    bigint NOT NULL,
    refill     bigint NOT NULL,
    zone       text COLLATE "C",
    holder     text,
    line_group text COLLATE "C",
    weight     integer,
    made_at    bigint,
    fence      bigint NOT NULL GENERATED BY DEFAULT AS IDENTITY, -- see _rate_limit_next_fence
    CONSTRAINT rate_limit_durable_hold_pkey PRIMARY KEY (id, key, prefix)
);

CREATE INDEX rate_limit_durable_hold_live ON rate_limit_durable_hold (key, prefix, ends_at) WHERE status = 0;

CREATE INDEX rate_limit_durable_hold_line ON rate_limit_durable_hold (key, prefix, line_group, fence)
    WHERE status = 3;

COMMENT ON TABLE rate_limit_durable_hold IS
    'The holds of the keys in rate_limit_durable. For the columns, see the comments on those of '
    'rate_limit_ephemeral_hold.';

-- The sweeper's progress: see sweep.sql.
CREATE TABLE rate_limit_sweeper (
    one          boolean NOT NULL DEFAULT true,
    durable      boolean NOT NULL DEFAULT false,
    holds        boolean NOT NULL DEFAULT false,
    next_page    bigint NOT NULL DEFAULT 0,
    held_by      text,
    held_at      timestamptz,
    completed_at timestamptz,
    CONSTRAINT rate_limit_sweeper_pkey PRIMARY KEY (one),
    CONSTRAINT rate_limit_sweeper_one CHECK (one)
);

COMMENT ON TABLE rate_limit_sweeper IS
    'The table and the page that the sweeper reads next. The first sweep makes the only row.';
COMMENT ON COLUMN rate_limit_sweeper.held_by IS
    'The sweeper that makes the current pass. NULL if any sweeper may continue the pass.';
COMMENT ON COLUMN rate_limit_sweeper.held_at IS
    'When a batch was last swept. 10 seconds later, any sweeper may continue the pass.';
COMMENT ON COLUMN rate_limit_sweeper.completed_at IS 'When a pass last reached the end of all tables.';

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
    'Policies for limiters that read this table. '
    'The row for the exact key decides, else the row for the longest prefix, else the row for all keys, '
    'else the policy in the code. '
    'Of several rows for the same keys, the row that began last decides.
Example: INSERT INTO rate_limit_policy (name, key, policy, comment)
    VALUES (''api'', ''customer:42'', ''sliding 5000/1m'', ''contract of 2026, ticket 1234'')';
COMMENT ON COLUMN rate_limit_policy.id IS 'Identifies the row, also in the history.';
COMMENT ON COLUMN rate_limit_policy.name IS 'Name of the limiter.';
COMMENT ON COLUMN rate_limit_policy.key IS 'The only key that the row is for, or NULL: see key_prefix.';
COMMENT ON COLUMN rate_limit_policy.key_prefix IS
    'The row is for keys with this prefix. If key and key_prefix are NULL, the row is for all keys of the limiter.';
COMMENT ON COLUMN rate_limit_policy.mode IS
    'enforce: the policy decides. '
    'shadow: the decisions of the policy are only reported. '
    'off: all requests are allowed and not counted. '
    'deny: all requests are denied until valid_until.';
COMMENT ON COLUMN rate_limit_policy.policy IS
    'The policy for the modes enforce and shadow, such as sliding 100/1m. rate_limit_allow explains its text.';
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
    'Old rows may be deleted. Keep the last row, because processes compare its version with the version they know.';
COMMENT ON COLUMN rate_limit_policy_history.version IS 'Number of the change, in ascending order.';
COMMENT ON COLUMN rate_limit_policy_history.by IS 'Who made the change: the role that logged in.';
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
    'The decisions of policies with the mode shadow, which processes report every 10 seconds. '
    'There is a row for each policy, and a row for each of the 1000 keys with the most denials.';
COMMENT ON COLUMN rate_limit_shadow.key IS 'The key, or empty for all keys together.';
COMMENT ON COLUMN rate_limit_shadow.decided IS 'How many requests were decided; 0 for a single key.';
COMMENT ON COLUMN rate_limit_shadow.denied IS 'How many of these requests the policy in force has denied.';
COMMENT ON COLUMN rate_limit_shadow.would_deny IS 'How many of these requests the shadow policy would have denied.';
