-- Keys that the configuration file declares. One that it declares no longer is revoked, and none of
-- its own any more.
alter table keys add column is_declared bigint not null default 0 check (is_declared in (0, 1));

create unique index keys_declared on keys (tenant_id, label) where is_declared = 1;
