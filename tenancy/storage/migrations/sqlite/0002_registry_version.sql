create table registry_version (
  one integer primary key check (one = 1),
  version integer not null
) strict;

insert into registry_version (one, version) values (1, 1);

create trigger tenants_came after insert on tenants
begin update registry_version set version = version + 1; end;

create trigger tenants_changed after update on tenants
begin update registry_version set version = version + 1; end;

create trigger tenants_went after delete on tenants
begin update registry_version set version = version + 1; end;

create trigger keys_came after insert on keys
begin update registry_version set version = version + 1; end;

create trigger keys_changed after update on keys
begin update registry_version set version = version + 1; end;

create trigger keys_went after delete on keys
begin update registry_version set version = version + 1; end;
