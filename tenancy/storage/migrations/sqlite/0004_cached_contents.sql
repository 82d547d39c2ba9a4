create table cached_contents (
  resource_id text primary key,
  tenant_id integer not null references tenants (tenant_id),
  workspace text not null,
  model text not null,
  display_name text not null,
  content blob,
  tokens integer not null check (tokens > 0),
  created_ms integer not null,
  updated_ms integer not null,
  expires_ms integer not null,
  ended_ms integer,
  check ((content is null) = (ended_ms is not null))
) strict, without rowid;

create index cached_contents_by_owner on cached_contents (tenant_id, workspace, resource_id);

create index cached_contents_by_expiry on cached_contents (expires_ms) where ended_ms is null;
