-- Sums of entries by the engine's life they ran in, written in the same transaction: what
-- reconciliation compares with the engine's own counts.
create table epoch_sums (
  epoch text primary key,
  entries integer not null,
  prompt_tokens integer not null,
  physical_cached_tokens integer not null,
  output_tokens integer not null,
  last_ended_ms integer not null
) strict, without rowid;

insert into epoch_sums
  select epoch, count(*), sum(prompt_tokens), sum(physical_cached_tokens), sum(output_tokens),
    max(ended_ms)
  from ledger where epoch <> '' group by epoch;
