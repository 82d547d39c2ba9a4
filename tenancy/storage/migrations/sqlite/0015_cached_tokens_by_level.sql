-- Of a request's cached tokens, those that were loaded from a level below the device. They are no
-- money: the chain does not cover them. Of older entries and sums they are not known, and 0.
alter table ledger add column host_cached_tokens integer not null default 0
  check (host_cached_tokens >= 0);
alter table ledger add column disk_cached_tokens integer not null default 0
  check (disk_cached_tokens >= 0);
alter table recent_sums add column host_cached_tokens integer not null default 0;
alter table recent_sums add column disk_cached_tokens integer not null default 0;
alter table usage_hours add column host_cached_tokens integer not null default 0;
alter table usage_hours add column disk_cached_tokens integer not null default 0;
alter table usage_days add column host_cached_tokens integer not null default 0;
alter table usage_days add column disk_cached_tokens integer not null default 0;
