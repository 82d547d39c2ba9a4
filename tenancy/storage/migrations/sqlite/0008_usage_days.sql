-- The same sums by day, so that a question about years looks at few rows.
create table usage_days (
  tenant_id integer not null references tenants (tenant_id),
  day_ms integer not null,
  key_id integer not null,
  model text not null,
  requests integer not null default 0,
  prompt_tokens integer not null default 0,
  cache_read_tokens integer not null default 0,
  cache_write_tokens integer not null default 0,
  fresh_tokens integer not null default 0,
  output_tokens integer not null default 0,
  physical_cached_tokens integer not null default 0,
  recomputed_promised_tokens integer not null default 0,
  hits integer not null default 0,
  ttft_hits integer not null default 0,
  ttft_hit_ms integer not null default 0,
  ttft_misses integer not null default 0,
  ttft_miss_ms integer not null default 0,
  charge_micros integer not null default 0,
  charge_rest integer not null default 0,
  saved_micros integer not null default 0,
  saved_rest integer not null default 0,
  adjusted_micros integer not null default 0,
  adjusted_rest integer not null default 0,
  primary key (tenant_id, day_ms, key_id, model)
) strict, without rowid;

insert into usage_days (tenant_id, day_ms, key_id, model,
  requests, prompt_tokens, cache_read_tokens, cache_write_tokens, fresh_tokens,
  output_tokens, physical_cached_tokens, recomputed_promised_tokens, hits, ttft_hits,
  ttft_hit_ms, ttft_misses, ttft_miss_ms, charge_micros, charge_rest, saved_micros,
  saved_rest, adjusted_micros, adjusted_rest)
  select tenant_id, hour_ms / 86400000 * 86400000, key_id, model,
    sum(requests), sum(prompt_tokens), sum(cache_read_tokens), sum(cache_write_tokens),
    sum(fresh_tokens), sum(output_tokens), sum(physical_cached_tokens),
    sum(recomputed_promised_tokens), sum(hits), sum(ttft_hits), sum(ttft_hit_ms),
    sum(ttft_misses), sum(ttft_miss_ms), sum(charge_micros), sum(charge_rest),
    sum(saved_micros), sum(saved_rest), sum(adjusted_micros), sum(adjusted_rest)
  from usage_hours group by 1, 2, 3, 4;
