-- Of a receipt: the engines elsewhere that were away and have not carried the erasure out yet, as a
-- JSON list of names, and when all engines and levels had; null until then.
alter table erasures add column pending_at text not null default '[]';
alter table erasures add column completed_ms integer;
update erasures set completed_ms = at_ms where levels not like '%"pending"%';
create index erasures_uncompleted on erasures (at_ms) where completed_ms is null;
create index erasures_by_time on erasures (at_ms);

-- Until when an engine elsewhere has carried out every erasure of the time.
create table erased_until (
  replica text primary key,
  until_ms integer not null
) strict, without rowid;
