-- What entries have more, or less, of tokens than the engine counted for their requests, by the life
-- of the engine. `gateway`: as in `engine_epochs`, or 'interrupted' for the entries of requests that
-- their gateway did not live to end: the engine counts those as abandoned. It comes with the
-- entries, so a gateway that dies leaves none unknown.
create table epoch_corrections (
  epoch text collate "C" not null,
  gateway text collate "C" not null,
  prompt_tokens bigint not null,
  cached_tokens bigint not null,
  output_tokens bigint not null,
  primary key (epoch, gateway)
);

insert into epoch_corrections (epoch, gateway, prompt_tokens, cached_tokens, output_tokens)
  select epoch, gateway, moved_prompt_tokens, moved_cached_tokens, moved_output_tokens
  from engine_epochs
  where moved_prompt_tokens <> 0 or moved_cached_tokens <> 0 or moved_output_tokens <> 0;

-- Of a gateway that died: what the engine finished for it and nobody entered.
alter table engine_epochs rename column moved_prompt_tokens to unbilled_prompt_tokens;
alter table engine_epochs rename column moved_cached_tokens to unbilled_cached_tokens;
alter table engine_epochs rename column moved_output_tokens to unbilled_output_tokens;
update engine_epochs
  set unbilled_prompt_tokens = 0, unbilled_cached_tokens = 0, unbilled_output_tokens = 0;
