-- Sums of the latest entries, in one row for all that they are summed by: the only sums that an entry
-- is added to when it is written. Each minute they are moved to usage_hours, usage_days and epoch_sums.
create table recent_sums (
  tenant_id bigint not null,
  hour_ms bigint not null,
  key_id bigint not null,
  model text collate "C" not null,
  epoch text collate "C" not null,
  requests bigint not null,
  prompt_tokens bigint not null,
  cache_read_tokens bigint not null,
  cache_write_tokens bigint not null,
  fresh_tokens bigint not null,
  output_tokens bigint not null,
  physical_cached_tokens bigint not null,
  recomputed_promised_tokens bigint not null,
  hits bigint not null,
  ttft_hits bigint not null,
  ttft_hit_ms bigint not null,
  ttft_misses bigint not null,
  ttft_miss_ms bigint not null,
  charge_micros bigint not null,
  charge_rest bigint not null,
  saved_micros bigint not null,
  saved_rest bigint not null,
  last_ended_ms bigint not null,
  primary key (tenant_id, hour_ms, key_id, model, epoch)
);
