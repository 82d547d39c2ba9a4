-- Levels of the cache below the device. How far a tenant's copies may be from what the model
-- computed, where they may rest, and what each level lost to an erasure.
alter table tenants add column fidelity text not null default 'exact'
  check (fidelity in ('exact', 'near', 'rough'));
alter table tenants add column at_rest text not null default 'local'
  check (at_rest in ('local', 'never'));
-- JSON: by level, blocks, bytes and state. Null: the receipt is older than the levels.
alter table erasures add column levels text;
