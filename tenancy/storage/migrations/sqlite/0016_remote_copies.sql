-- Cached tokens that came from the remote store have a column of their own. Of older entries they
-- are among those of the disk. A tenant's KV may rest on the server's disk and not beyond it.
alter table ledger add column remote_cached_tokens integer not null default 0
  check (remote_cached_tokens >= 0);
alter table recent_sums add column remote_cached_tokens integer not null default 0;
alter table usage_hours add column remote_cached_tokens integer not null default 0;
alter table usage_days add column remote_cached_tokens integer not null default 0;
-- A check of a column goes only with its column.
alter table tenants add column rests text not null default 'local'
  check (rests in ('local', 'remote', 'never'));
update tenants set rests = at_rest;
alter table tenants drop column at_rest;
alter table tenants rename column rests to at_rest;
