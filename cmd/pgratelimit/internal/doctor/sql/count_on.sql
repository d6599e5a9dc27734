-- These statements set the sequences to the largest numbers in the policies and their history.
SELECT setval(s, greatest(pg_sequence_last_value(s), (SELECT max(id) FROM rate_limit_policy),
    (SELECT max(policy_id) FROM rate_limit_policy_history)))
FROM CAST(pg_get_serial_sequence('rate_limit_policy', 'id') AS regclass) AS s;
SELECT setval(s, greatest(pg_sequence_last_value(s), (SELECT max(version) FROM rate_limit_policy_history)))
FROM CAST(pg_get_serial_sequence('rate_limit_policy_history', 'version') AS regclass) AS s
