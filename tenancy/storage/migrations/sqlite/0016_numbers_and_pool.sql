-- A number is never given again: what is left of a deleted tenant or key anywhere (in a cache, a
-- receipt, a log) must not become another's. SQLite cannot add "autoincrement" to a column, so both
-- tables are made anew, while foreign keys are not looked at. Indexes and triggers go with the old
-- ones and come again.
create table tenants_made_anew (
  tenant_id integer primary key autoincrement,
  name text not null unique,
  status text not null check (status in ('active', 'suspended')),
  floor_blocks integer not null default 0 check (floor_blocks >= 0),
  ceiling_blocks integer check (ceiling_blocks >= 0),
  weight real not null default 1.0 check (weight > 0),
  priority integer not null default 0,
  created_ms integer not null,
  tier text not null default 'standard',
  classes text,
  promised_blocks_max integer check (promised_blocks_max >= 0),
  is_declared integer not null default 0 check (is_declared in (0, 1)),
  limits text not null default '{}'
) strict;

insert into tenants_made_anew
  select tenant_id, name, status, floor_blocks, ceiling_blocks, weight, priority, created_ms, tier,
    classes, promised_blocks_max, is_declared, limits
  from tenants;

drop table tenants;

alter table tenants_made_anew rename to tenants;

create trigger tenants_came after insert on tenants begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'tenant', new.tenant_id from registry_version;
end;

create trigger tenants_changed after update on tenants begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'tenant', new.tenant_id from registry_version;
end;

create trigger tenants_went after delete on tenants begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'tenant', old.tenant_id from registry_version;
end;

create table keys_made_anew (
  key_id integer primary key autoincrement,
  tenant_id integer references tenants (tenant_id),
  workspace text not null,
  label text not null,
  digest blob not null unique check (length(digest) = 32),
  shown text not null,
  created_ms integer not null,
  expires_ms integer,
  revoked_ms integer,
  scopes text not null default 'cache inference usage',
  limits text not null default '{}',
  replaced_by integer,
  is_declared integer not null default 0 check (is_declared in (0, 1)),
  line_id integer,
  check ((tenant_id is null) = (scopes = 'admin'))
) strict;

insert into keys_made_anew
  select key_id, tenant_id, workspace, label, digest, shown, created_ms, expires_ms, revoked_ms,
    scopes, limits, replaced_by, is_declared, line_id
  from keys;

drop table keys;

alter table keys_made_anew rename to keys;

create index keys_by_tenant on keys (tenant_id);

create unique index keys_declared on keys (tenant_id, label) where is_declared = 1;

create trigger keys_came after insert on keys begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'key', new.key_id from registry_version;
end;

create trigger keys_changed after update on keys begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'key', new.key_id from registry_version;
end;

create trigger keys_went after delete on keys begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'key', old.key_id from registry_version;
end;

-- Those that were deleted before are known as far as anything names them.
delete from sqlite_sequence where name in ('tenants', 'keys');

insert into sqlite_sequence (name, seq)
  select 'tenants', coalesce(max(number), 0) from (
    select max(tenant_id) as number from tenants
    union all select max(id) from registry_changes where kind = 'tenant')
  union all
  select 'keys', coalesce(max(number), 0) from (
    select max(key_id) as number from keys
    union all select max(id) from registry_changes where kind = 'key'
    union all select max(key_id) from ledger
    union all select max(key_id) from erasures);

-- What floors together may take of the pool of the engine that was started last.
create table engine_pool (
  one integer primary key check (one = 1),
  floor_blocks_max integer not null check (floor_blocks_max >= 0)
) strict;
