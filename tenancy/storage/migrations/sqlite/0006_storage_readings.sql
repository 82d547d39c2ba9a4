-- An engine sums what it holds from its start on, and any gateway may enter what it has told. A
-- meter is an engine's life, `seen_ms` when it was last heard. `was_forgotten`: its readings were
-- deleted, as it was not heard for long.
drop table storage_meters;
create table storage_meters (
  epoch text not null primary key,
  seen_ms integer not null,
  was_forgotten integer not null check (was_forgotten in (0, 1))
) strict, without rowid;

-- The last number that was entered, by what it counts: the next one adds the difference.
create table storage_readings (
  epoch text not null references storage_meters (epoch),
  tenant_id integer not null,
  model text not null,
  class text not null,
  token_seconds integer not null check (token_seconds >= 0),
  primary key (epoch, tenant_id, model, class)
) strict, without rowid;
