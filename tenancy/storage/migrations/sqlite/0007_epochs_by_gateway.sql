-- Several gateways may have one engine. A row has what one of them knows of one life of an engine.
-- `gateway`: a gateway's id and a name of its own start; '' before. Of the engine: what it counted
-- (`*_tokens`), and what of that is charged to nobody (`uncharged_*`); both are the same for all
-- gateways and never fall. Of the gateway: what its entries have more, or less, than the engine
-- counted for them (`moved_*`), and its own counts (`metric_*`). `is_ended`: it will tell no more.
create table epochs_by_gateway (
  epoch text not null,
  gateway text not null,
  first_seen_ms integer not null,
  last_seen_ms integer not null,
  is_ended integer not null check (is_ended in (0, 1)),
  prompt_tokens integer not null,
  cached_tokens integer not null,
  output_tokens integer not null,
  uncharged_prompt_tokens integer not null,
  uncharged_cached_tokens integer not null,
  uncharged_output_tokens integer not null,
  moved_prompt_tokens integer not null,
  moved_cached_tokens integer not null,
  moved_output_tokens integer not null,
  metric_prompt_tokens integer not null,
  metric_cached_tokens integer not null,
  metric_output_tokens integer not null,
  primary key (epoch, gateway)
) strict, without rowid;

insert into epochs_by_gateway (epoch, first_seen_ms, last_seen_ms, is_ended, prompt_tokens, cached_tokens, output_tokens, metric_prompt_tokens, metric_cached_tokens, metric_output_tokens,
  gateway, uncharged_prompt_tokens, uncharged_cached_tokens, uncharged_output_tokens,
  moved_prompt_tokens, moved_cached_tokens, moved_output_tokens)
  select epoch, first_seen_ms, last_seen_ms, is_ended, prompt_tokens, cached_tokens, output_tokens, metric_prompt_tokens, metric_cached_tokens, metric_output_tokens,
  '', 0, 0, 0, 0, 0, 0 from engine_epochs;
drop table engine_epochs;
alter table epochs_by_gateway rename to engine_epochs;
