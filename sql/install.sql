-- This file loads all files of sql/ into the first schema of search_path, as the migrations do:
--
--   psql -1 -f sql/install.sql
\set ON_ERROR_STOP on
\ir tables.sql
\ir types.sql
\ir fixed.sql
\ir sliding.sql
\ir tokenbucket.sql
\ir slidinglog.sql
\ir calendar.sql
\ir concurrency.sql
\ir all.sql
\ir refund.sql
\ir charge.sql
\ir reserve.sql
\ir hold.sql
\ir left.sql
\ir takeall.sql
\ir reset.sql
\ir policy.sql
\ir allow.sql
\ir twins.sql
\ir sweep.sql
\ir policies.sql
\ir access.sql
\ir triggers.sql
\ir rights.sql
\ir version.sql
