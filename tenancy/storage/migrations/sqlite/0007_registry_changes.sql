-- Which tenants and keys changed, by the registry's version after it: who knows a version reads what
-- came since, not everything. The latest ten thousand are kept.
create table registry_changes (
  version integer primary key,
  kind text not null check (kind in ('tenant', 'key')),
  id integer not null
) strict;

create trigger registry_changes_are_bounded after insert on registry_changes
begin delete from registry_changes where version <= new.version - 10000; end;

drop trigger tenants_came;
drop trigger tenants_changed;
drop trigger tenants_went;
drop trigger keys_came;
drop trigger keys_changed;
drop trigger keys_went;

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
