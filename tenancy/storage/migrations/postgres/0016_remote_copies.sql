-- Cached tokens that came from the remote store have a column of their own. Of older entries they
-- are among those of the disk. A tenant's KV may rest on the server's disk and not beyond it.
alter table ledger add column remote_cached_tokens bigint not null default 0
  check (remote_cached_tokens >= 0);
alter table recent_sums add column remote_cached_tokens bigint not null default 0;
alter table usage_hours add column remote_cached_tokens bigint not null default 0;
alter table usage_days add column remote_cached_tokens bigint not null default 0;
alter table tenants drop constraint tenants_at_rest_check;
alter table tenants add constraint tenants_at_rest_check
  check (at_rest in ('local', 'remote', 'never'));
