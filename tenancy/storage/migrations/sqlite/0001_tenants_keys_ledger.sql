create table tenants (
  tenant_id integer primary key,
  name text not null unique,
  status text not null check (status in ('active', 'suspended')),
  floor_blocks integer not null default 0 check (floor_blocks >= 0),
  ceiling_blocks integer check (ceiling_blocks >= 0),
  weight real not null default 1.0 check (weight > 0),
  priority integer not null default 0,
  created_ms integer not null
) strict;

create table keys (
  key_id integer primary key,
  tenant_id integer not null references tenants (tenant_id),
  workspace text not null,
  label text not null,
  digest blob not null unique check (length(digest) = 32),
  shown text not null,
  created_ms integer not null,
  expires_ms integer,
  revoked_ms integer
) strict;

create table holds (
  request_id text primary key,
  tenant_id integer not null references tenants (tenant_id),
  key_id integer not null,
  model text not null,
  started_ms integer not null
) strict, without rowid;

create table ledger (
  entry_id integer primary key,
  request_id text not null unique,
  tenant_id integer not null references tenants (tenant_id),
  key_id integer not null,
  model text not null,
  ending text not null,
  started_ms integer not null,
  ended_ms integer not null,
  prompt_tokens integer not null check (prompt_tokens >= 0),
  cache_read_tokens integer not null check (cache_read_tokens >= 0),
  cache_write_tokens integer not null check (cache_write_tokens >= 0),
  fresh_tokens integer not null check (fresh_tokens >= 0),
  output_tokens integer not null check (output_tokens >= 0),
  physical_cached_tokens integer not null check (physical_cached_tokens >= 0),
  check (prompt_tokens = cache_read_tokens + cache_write_tokens + fresh_tokens)
) strict;

create index ledger_by_tenant on ledger (tenant_id, ended_ms);

create trigger ledger_entries_stay before delete on ledger
begin select raise(abort, 'ledger entries are never deleted'); end;

create trigger ledger_entries_never_change before update on ledger
begin select raise(abort, 'ledger entries never change'); end;
