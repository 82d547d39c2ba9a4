-- Prices. A row is never changed; a new version of a name takes over from its valid_from_ms.
create table rate_cards (
  name text not null,
  version integer not null check (version >= 1),
  model text not null,
  tier text not null,
  currency text not null,
  valid_from_ms integer not null,
  valid_until_ms integer,
  prices text not null,
  created_ms integer not null,
  primary key (name, version),
  check (valid_until_ms is null or valid_until_ms > valid_from_ms)
) strict, without rowid;

create trigger rate_cards_stay before delete on rate_cards
begin select raise(abort, 'rate cards are never deleted'); end;

create trigger rate_cards_never_change before update on rate_cards
begin select raise(abort, 'rate cards never change'); end;

-- key_id 0: the tenant's own budget. What has been spent is two numbers, so that sums never
-- outgrow an integer: whole micro-dollars, and pico-dollars below one.
create table budgets (
  tenant_id integer not null references tenants (tenant_id) on delete cascade,
  key_id integer not null default 0,
  window text not null check (window in ('day', 'month')),
  hard_micros integer check (hard_micros >= 0),
  soft_micros integer check (soft_micros >= 0),
  primary key (tenant_id, key_id, window)
) strict, without rowid;

create table budget_windows (
  tenant_id integer not null references tenants (tenant_id) on delete cascade,
  key_id integer not null,
  window text not null,
  starts_ms integer not null,
  spent_micros integer not null,
  spent_rest integer not null check (spent_rest between 0 and 999999),
  reserved_micros integer not null,
  reserved_rest integer not null check (reserved_rest between 0 and 999999),
  primary key (tenant_id, key_id, window, starts_ms),
  check (spent_micros >= 0 and reserved_micros >= 0)
) strict, without rowid;

-- Differs after any change of cards or budgets, by whatever process.
create table money_version (
  one integer primary key check (one = 1),
  version integer not null
) strict;

insert into money_version (one, version) values (1, 1);

create trigger rate_cards_came after insert on rate_cards
begin update money_version set version = version + 1; end;

create trigger budgets_came after insert on budgets
begin update money_version set version = version + 1; end;

create trigger budgets_changed after update on budgets
begin update money_version set version = version + 1; end;

create trigger budgets_went after delete on budgets
begin update money_version set version = version + 1; end;

-- A hold knows its price, its budgets' share, and the instant it is booked at.
alter table holds add column workspace text not null default 'default';
alter table holds add column tier text not null default 'standard';
alter table holds add column dialect text not null default '';
alter table holds add column epoch text not null default '';
alter table holds add column rate_card_id text not null default 'free';
alter table holds add column reserved_tokens integer not null default 0;
alter table holds add column reserved_pico integer not null default 0;
alter table holds add column booked_ms integer not null default 0;

drop trigger ledger_entries_never_change;
drop index ledger_by_tenant;

alter table ledger add column reads text not null default '{}';
alter table ledger add column writes text not null default '{}';
alter table ledger add column workspace text not null default 'default';
alter table ledger add column tier text not null default 'standard';
alter table ledger add column dialect text not null default '';
alter table ledger add column recomputed_promised_tokens integer not null default 0
  check (recomputed_promised_tokens >= 0);
alter table ledger add column ttft_ms integer check (ttft_ms >= 0);
alter table ledger add column epoch text not null default '';
alter table ledger add column rate_card_id text not null default 'free';
alter table ledger add column charge_pico integer not null default 0 check (charge_pico >= 0);
alter table ledger add column saved_pico integer not null default 0;
-- The instant that decides the entry's period: its start, or the first that is not closed.
alter table ledger add column booked_ms integer not null default 0;
-- SHA-256 of the row before and of this row. Entries older than this column have none.
alter table ledger add column chain blob not null default x'';

update holds set booked_ms = started_ms;
update ledger set booked_ms = started_ms;

create index ledger_by_tenant on ledger (tenant_id, booked_ms);

create trigger ledger_entries_never_change before update on ledger
begin select raise(abort, 'ledger entries never change'); end;

-- Credits (below zero) and debits on an entry.
create table adjustments (
  number integer primary key,
  adjustment_id text not null unique,
  request_id text not null references ledger (request_id),
  tenant_id integer not null references tenants (tenant_id),
  amount_pico integer not null check (amount_pico <> 0),
  reason text not null,
  made_ms integer not null,
  booked_ms integer not null,
  chain blob not null
) strict;

create index adjustments_by_request on adjustments (request_id);
create index adjustments_by_tenant on adjustments (tenant_id, booked_ms);

create trigger adjustments_stay before delete on adjustments
begin select raise(abort, 'adjustments are never deleted'); end;

create trigger adjustments_never_change before update on adjustments
begin select raise(abort, 'adjustments never change'); end;

create table closes (
  day integer primary key,
  closed_ms integer not null,
  entries integer not null,
  prompt_tokens integer not null,
  cache_read_tokens integer not null,
  cache_write_tokens integer not null,
  output_tokens integer not null,
  charge_pico text not null,
  adjustments integer not null,
  adjusted_pico text not null,
  storage_token_seconds integer not null,
  digest blob not null
) strict;

create trigger closes_stay before delete on closes
begin select raise(abort, 'closed days stay closed'); end;

create trigger closes_never_change before update on closes
begin select raise(abort, 'closed days never change'); end;

create trigger ledger_closed before insert on ledger
when new.booked_ms < (select 86400000 * (max(day) + 1) from closes)
begin select raise(abort, 'this day is closed'); end;

create trigger adjustments_closed before insert on adjustments
when new.booked_ms < (select 86400000 * (max(day) + 1) from closes)
begin select raise(abort, 'this day is closed'); end;

-- The head of the chain whenever entries of another hour than before began to come.
create table seals (
  number integer primary key,
  hour_ms integer not null,
  entry_id integer not null,
  chain blob not null
) strict;

create trigger seals_stay before delete on seals
begin select raise(abort, 'seals stay'); end;

create trigger seals_never_change before update on seals
begin select raise(abort, 'seals never change'); end;

-- Sums of entries by the hour they are booked in, written in the same transaction.
create table usage_hours (
  tenant_id integer not null references tenants (tenant_id),
  hour_ms integer not null,
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
  primary key (tenant_id, hour_ms, key_id, model)
) strict, without rowid;

insert into usage_hours (tenant_id, hour_ms, key_id, model, requests, prompt_tokens,
  cache_read_tokens, cache_write_tokens, fresh_tokens, output_tokens, physical_cached_tokens, hits)
  select tenant_id, booked_ms / 3600000 * 3600000, key_id, model, count(*), sum(prompt_tokens),
    sum(cache_read_tokens), sum(cache_write_tokens), sum(fresh_tokens), sum(output_tokens),
    sum(physical_cached_tokens), sum(cache_read_tokens > 0)
  from ledger group by 1, 2, 3, 4;

-- Tokens times seconds in the cache, by the hour.
create table storage_hours (
  tenant_id integer not null references tenants (tenant_id),
  hour_ms integer not null,
  model text not null,
  class text not null,
  rate_card_id text not null,
  token_seconds integer not null check (token_seconds >= 0),
  primary key (tenant_id, hour_ms, model, class, rate_card_id)
) strict, without rowid;

-- What the engine and the gateway counted themselves, by life of the engine.
create table engine_epochs (
  epoch text primary key,
  first_seen_ms integer not null,
  last_seen_ms integer not null,
  is_ended integer not null check (is_ended in (0, 1)),
  prompt_tokens integer not null,
  cached_tokens integer not null,
  output_tokens integer not null,
  metric_prompt_tokens integer not null,
  metric_cached_tokens integer not null,
  metric_output_tokens integer not null
) strict, without rowid;
