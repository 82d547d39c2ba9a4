-- What floors together may take of the pool of the engine that was started last.
create table engine_pool (
  one bigint primary key check (one = 1),
  floor_blocks_max bigint not null check (floor_blocks_max >= 0)
);
