-- Sums of the latest entries, in one row for all that they are summed by: the only sums that an entry
-- is added to when it is written. Each minute they are moved to usage_hours, usage_days and epoch_sums.
create table recent_sums (
  tenant_id integer not null,
  hour_ms integer not null,
  key_id integer not null,
  model text not null,
  epoch text not null,
  requests integer not null,
  prompt_tokens integer not null,
  cache_read_tokens integer not null,
  cache_write_tokens integer not null,
  fresh_tokens integer not null,
  output_tokens integer not null,
  physical_cached_tokens integer not null,
  recomputed_promised_tokens integer not null,
  hits integer not null,
  ttft_hits integer not null,
  ttft_hit_ms integer not null,
  ttft_misses integer not null,
  ttft_miss_ms integer not null,
  charge_micros integer not null,
  charge_rest integer not null,
  saved_micros integer not null,
  saved_rest integer not null,
  last_ended_ms integer not null,
  primary key (tenant_id, hour_ms, key_id, model, epoch)
) strict, without rowid;
