alter table tenants add column tier text not null default 'standard';
alter table tenants add column classes text;
alter table tenants add column promised_blocks_max integer check (promised_blocks_max >= 0);
alter table tenants add column is_declared integer not null default 0 check (is_declared in (0, 1));
alter table tenants add column limits text not null default '{}';

-- An administrator's key belongs to no tenant; SQLite cannot drop "not null" from a column, so the
-- table is made anew. Its triggers go with the old one and come again.
create table keys_made_anew (
  key_id integer primary key,
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
  check ((tenant_id is null) = (scopes = 'admin'))
) strict;

insert into keys_made_anew
  (key_id, tenant_id, workspace, label, digest, shown, created_ms, expires_ms, revoked_ms)
  select key_id, tenant_id, workspace, label, digest, shown, created_ms, expires_ms, revoked_ms
  from keys;

drop table keys;

alter table keys_made_anew rename to keys;

create index keys_by_tenant on keys (tenant_id);

create trigger keys_came after insert on keys
begin update registry_version set version = version + 1; end;

create trigger keys_changed after update on keys
begin update registry_version set version = version + 1; end;

create trigger keys_went after delete on keys
begin update registry_version set version = version + 1; end;

create table erasures (
  receipt_id text primary key,
  tenant_id integer not null references tenants (tenant_id),
  key_id integer not null,
  at_ms integer not null,
  what text not null,
  namespaces integer not null,
  namespace_digest text not null,
  blocks integer not null
) strict, without rowid;

create index erasures_by_tenant on erasures (tenant_id, at_ms);
