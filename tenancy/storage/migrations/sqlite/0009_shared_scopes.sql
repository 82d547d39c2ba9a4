-- Caches that workspaces of several tenants share. A number is never used again: what an ended scope
-- held must not be found by another.
create table shared_scopes (
  scope_id integer primary key autoincrement,
  name text not null unique,
  owner_id integer not null references tenants (tenant_id),
  is_declared integer not null default 0 check (is_declared in (0, 1)),
  created_ms integer not null
) strict;

-- A workspace is in one at most. An empty workspace stands for all of the tenant's.
create table scope_members (
  tenant_id integer not null references tenants (tenant_id),
  workspace text not null,
  scope_id integer not null references shared_scopes (scope_id),
  primary key (tenant_id, workspace)
) strict, without rowid;

create index scope_members_by_scope on scope_members (scope_id);

-- Whoever follows the registry reads a member's tenant again.
create trigger scope_members_came after insert on scope_members begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'tenant', new.tenant_id from registry_version;
end;

create trigger scope_members_went after delete on scope_members begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'tenant', old.tenant_id from registry_version;
end;
