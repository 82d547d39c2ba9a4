-- The meters of storage, one of each gateway that runs, and the number of the last readings that
-- were counted: readings that are written again count once.
create table storage_meters (
  meter text collate "C" not null primary key,
  number bigint not null check (number >= 0),
  seen_ms bigint not null
);
