-- This query returns the schema's owner, if the owner is another role and this role may act as the owner.
SELECT quote_ident(current_user), quote_ident(n.nspname), quote_ident(o.rolname)
FROM pg_namespace AS n
JOIN pg_database AS d ON d.datname = current_database()
JOIN pg_roles AS o
    ON o.oid = CASE pg_get_userbyid(n.nspowner) WHEN 'pg_database_owner' THEN d.datdba ELSE n.nspowner END
WHERE n.nspname = current_setting('pgratelimit.schema') AND o.rolname <> current_user AND pg_has_role(o.oid, 'MEMBER')
