-- Several gateways may have one engine. A row has what one of them knows of one life of an engine.
-- `gateway`: a gateway's id and a name of its own start; '' before. Of the engine: what it counted
-- (`*_tokens`), and what of that is charged to nobody (`uncharged_*`); both are the same for all
-- gateways and never fall. Of the gateway: what its entries have more, or less, than the engine
-- counted for them (`moved_*`), and its own counts (`metric_*`). `is_ended`: it will tell no more.
create table epochs_by_gateway (
  epoch text collate "C" not null,
  gateway text collate "C" not null,
  first_seen_ms bigint not null,
  last_seen_ms bigint not null,
  is_ended bigint not null check (is_ended in (0, 1)),
  prompt_tokens bigint not null,
  cached_tokens bigint not null,
  output_tokens bigint not null,
  uncharged_prompt_tokens bigint not null,
  uncharged_cached_tokens bigint not null,
  uncharged_output_tokens bigint not null,
  moved_prompt_tokens bigint not null,
  moved_cached_tokens bigint not null,
  moved_output_tokens bigint not null,
  metric_prompt_tokens bigint not null,
  metric_cached_tokens bigint not null,
  metric_output_tokens bigint not null,
  primary key (epoch, gateway)
);

insert into epochs_by_gateway (epoch, first_seen_ms, last_seen_ms, is_ended, prompt_tokens, cached_tokens, output_tokens, metric_prompt_tokens, metric_cached_tokens, metric_output_tokens,
  gateway, uncharged_prompt_tokens, uncharged_cached_tokens, uncharged_output_tokens,
  moved_prompt_tokens, moved_cached_tokens, moved_output_tokens)
  select epoch, first_seen_ms, last_seen_ms, is_ended, prompt_tokens, cached_tokens, output_tokens, metric_prompt_tokens, metric_cached_tokens, metric_output_tokens,
  '', 0, 0, 0, 0, 0, 0 from engine_epochs;
drop table engine_epochs;
alter table epochs_by_gateway rename to engine_epochs;
