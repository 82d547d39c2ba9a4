-- The schema, version 1. Times are milliseconds since 1970 (`_ms`), money is whole pico-dollars
-- (`_pico`) or, where sums could outgrow 64 bits, whole micro-dollars (`_micros`) with the
-- pico-dollars below one in a second column (`_rest`).

-- TENANTS AND KEYS

-- `autoincrement`: an id is never reused, because a deleted tenant's id may still stand in a
-- cache, a receipt or a log.
create table tenants (
  tenant_id integer primary key autoincrement,
  name text not null unique,
  status text not null check (status in ('active', 'suspended')),
  floor_blocks integer not null default 0 check (floor_blocks >= 0),
  ceiling_blocks integer check (ceiling_blocks >= 0),
  weight real not null default 1.0 check (weight > 0),
  priority integer not null default 0,
  created_ms integer not null,
  tier text not null default 'standard',
  -- Retention classes the tenant may use; null means all.
  classes text,
  -- The retention class of requests that name none; null leaves it to their API.
  default_class text,
  promised_blocks_max integer check (promised_blocks_max >= 0),
  -- How far copies of the tenant's KV may be from what the model computed.
  fidelity text not null default 'exact' check (fidelity in ('exact', 'near', 'rough')),
  -- How far from the device such copies may rest: on the server, also in the remote store, or on
  -- no disk.
  at_rest text not null default 'local' check (at_rest in ('local', 'remote', 'never')),
  -- Whether requests may ask for attention windows ('allowed', 'never'), or the window of those
  -- that ask for nothing ('window=W;sinks=S').
  attention text not null default 'allowed'
    check (attention in ('allowed', 'never') or substr(attention, 1, 7) = 'window='),
  -- 1 if the configuration file declares this tenant.
  is_declared integer not null default 0 check (is_declared in (0, 1)),
  limits text not null default '{}'
) strict;

-- An administrator's key has no tenant. Ids are never reused, as for tenants.
create table keys (
  key_id integer primary key autoincrement,
  tenant_id integer references tenants (tenant_id),
  workspace text not null,
  label text not null,
  -- SHA-256 of the key; the key itself is not stored.
  digest blob not null unique check (length(digest) = 32),
  -- The key's first characters, for lists.
  shown text not null,
  created_ms integer not null,
  expires_ms integer,
  revoked_ms integer,
  scopes text not null default 'cache inference usage',
  -- Scopes of an administrator's key, sorted; null for a tenant's key, and for an administrator's
  -- key that has all of them.
  admin_scopes text,
  limits text not null default '{}',
  -- How the gateway treats request fields that it does not honour; null leaves it to the server.
  tolerance text check (tolerance in ('standard', 'strict', 'lenient')),
  -- The key that replaced this one when it was rotated.
  replaced_by integer,
  -- 1 if the configuration file declares this key. A key that the file no longer declares is
  -- revoked and set to 0.
  is_declared integer not null default 0 check (is_declared in (0, 1)),
  -- The first key of a chain of rotations; null for the key itself. Counts by key cover the chain.
  line_id integer,
  check ((tenant_id is null) = (scopes = 'admin'))
) strict;

create index keys_by_tenant on keys (tenant_id);

create unique index keys_declared on keys (tenant_id, label) where is_declared = 1;

-- Caches shared by workspaces of several tenants. Ids are never reused: a new scope must not find
-- the cache of a deleted one.
create table shared_scopes (
  scope_id integer primary key autoincrement,
  name text not null unique,
  owner_id integer not null references tenants (tenant_id),
  is_declared integer not null default 0 check (is_declared in (0, 1)),
  created_ms integer not null
) strict;

-- A workspace is a member of one scope at most. An empty workspace means all of the tenant's.
create table scope_members (
  tenant_id integer not null references tenants (tenant_id),
  workspace text not null,
  scope_id integer not null references shared_scopes (scope_id),
  primary key (tenant_id, workspace)
) strict, without rowid;

create index scope_members_by_scope on scope_members (scope_id);

-- The version grows with every change of tenants, keys and scope members, by any process.
create table registry_version (
  one integer primary key check (one = 1),
  version integer not null
) strict;

insert into registry_version (one, version) values (1, 1);

-- The tenant or key that each registry version changed: a reader that knows a version reads the
-- changes since, not everything. The latest 10,000 are kept.
create table registry_changes (
  version integer primary key,
  kind text not null check (kind in ('tenant', 'key')),
  id integer not null
) strict;

create trigger registry_changes_are_bounded after insert on registry_changes
begin delete from registry_changes where version <= new.version - 10000; end;

create trigger tenants_came after insert on tenants begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'tenant', new.tenant_id from registry_version;
end;

create trigger tenants_changed after update on tenants begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'tenant', new.tenant_id from registry_version;
end;

create trigger tenants_went after delete on tenants begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'tenant', old.tenant_id from registry_version;
end;

create trigger keys_came after insert on keys begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'key', new.key_id from registry_version;
end;

create trigger keys_changed after update on keys begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'key', new.key_id from registry_version;
end;

create trigger keys_went after delete on keys begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'key', old.key_id from registry_version;
end;

-- Membership decides where a tenant's requests are cached, so it counts as a change of the tenant.
create trigger scope_members_came after insert on scope_members begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'tenant', new.tenant_id from registry_version;
end;

create trigger scope_members_went after delete on scope_members begin
  update registry_version set version = version + 1;
  insert into registry_changes select version, 'tenant', old.tenant_id from registry_version;
end;

-- The sum of all floors may not exceed `floor_blocks_max`, a share of the pool of the engine that
-- started last.
create table engine_pool (
  one integer primary key check (one = 1),
  floor_blocks_max integer not null check (floor_blocks_max >= 0)
) strict;

-- CONTENT AND ITS ERASURE

-- Receipts of erasures: which namespaces were erased, and how many blocks. `levels`: blocks, bytes
-- and state by level, as JSON. `embeddings`: vectors of texts that were erased beside the blocks.
create table erasures (
  receipt_id text primary key,
  tenant_id integer not null references tenants (tenant_id),
  key_id integer not null,
  at_ms integer not null,
  what text not null,
  namespaces integer not null,
  namespace_digest text not null,
  blocks integer not null,
  levels text not null default '{}',
  embeddings integer not null default 0
) strict, without rowid;

create index erasures_by_tenant on erasures (tenant_id, at_ms);

-- Cached contents that clients named as resources. An ended one keeps its row and loses its
-- content.
create table cached_contents (
  resource_id text primary key,
  tenant_id integer not null references tenants (tenant_id),
  workspace text not null,
  model text not null,
  display_name text not null,
  content blob,
  tokens integer not null check (tokens > 0),
  created_ms integer not null,
  updated_ms integer not null,
  expires_ms integer not null,
  ended_ms integer,
  check ((content is null) = (ended_ms is not null))
) strict, without rowid;

create index cached_contents_by_owner on cached_contents (tenant_id, workspace, resource_id);

create index cached_contents_by_expiry on cached_contents (expires_ms) where ended_ms is null;

-- Requests with an Idempotency-Key, and the answers to them, kept for a limited time. Answers are
-- content, so they stand apart from the ledger and are erased with the tenant's cache. A running
-- request has no `until_ms`; an answer that was too large has no body.
create table named_requests (
  tenant_id integer not null references tenants (tenant_id),
  name text not null,
  workspace text not null,
  digest blob not null check (length(digest) = 32),
  request_id text not null unique,
  until_ms integer,
  head text not null default '',
  body blob,
  unique (tenant_id, name)
) strict;

create index named_requests_by_end on named_requests (until_ms) where until_ms is not null;

-- Sums of `named_requests` by tenant, so that a request need not count rows.
create table named_sums (
  tenant_id integer primary key references tenants (tenant_id),
  names integer not null check (names >= 0),
  bytes integer not null check (bytes >= 0)
) strict;

-- Responses that clients continue by id. Their rows are content: they are deleted at their expiry
-- and with every erasure of their tenant's cache. `thread_id`: the first response of the chain of
-- `previous_id`. `input` holds the request's own items and `response` the response, both as JSON.
-- `bytes` counts both, and `thread_bytes` also those of all earlier responses of the chain.
create table stored_responses (
  response_id text not null unique,
  tenant_id integer not null references tenants (tenant_id),
  workspace text not null,
  thread_id text not null,
  previous_id text,
  created_ms integer not null,
  expires_ms integer not null,
  bytes integer not null check (bytes >= 0),
  thread_bytes integer not null check (thread_bytes >= bytes),
  input blob not null,
  response blob not null
) strict;

create index stored_responses_by_owner on stored_responses (tenant_id, workspace);

create index stored_responses_by_thread on stored_responses (thread_id);

create index stored_responses_by_expiry on stored_responses (expires_ms);

-- Sums of `stored_responses` by tenant, so that a request need not count rows.
create table stored_sums (
  tenant_id integer primary key references tenants (tenant_id),
  responses integer not null check (responses >= 0),
  bytes integer not null check (bytes >= 0)
) strict;

-- Conversations, which clients make and responses append their items to. Their rows are content:
-- they are deleted at their expiry and with every erasure of their tenant's cache. `positions`:
-- items that were ever appended, so the position of the next one. `bytes` counts the metadata and
-- all items. `metadata` is JSON.
create table conversations (
  conversation_id text not null unique,
  tenant_id integer not null references tenants (tenant_id),
  workspace text not null,
  created_ms integer not null,
  expires_ms integer not null,
  positions integer not null check (positions >= 0),
  bytes integer not null check (bytes >= 0),
  metadata blob not null
) strict;

create index conversations_by_owner on conversations (tenant_id, workspace);

create index conversations_by_expiry on conversations (expires_ms);

-- `item` is the item's JSON with its id, as it is listed.
create table conversation_items (
  conversation_id text not null references conversations (conversation_id),
  position integer not null,
  item_id text not null unique,
  bytes integer not null check (bytes >= 0),
  item blob not null,
  unique (conversation_id, position)
) strict;

-- Prefixes that were written in a retention class and are still promised, so that a promise
-- outlives its gateway. `gateway` is the gateway that made the promise; '' where a file has one.
-- `retention` holds the terms of the class as they were, as JSON.
create table written_prefixes (
  gateway text not null,
  namespace blob not null,
  digest blob not null,
  class text not null,
  tenant_id integer not null,
  tokens integer not null check (tokens > 0),
  retention text not null,
  -- Null: without an end.
  expires_ms integer,
  promised_until_ms integer not null,
  epoch text not null,
  writer integer not null,
  model text not null,
  template text not null,
  content blob not null,
  primary key (gateway, namespace, digest, class)
) strict, without rowid;

create index written_prefixes_by_tenant on written_prefixes (tenant_id);

create index written_prefixes_by_end on written_prefixes (promised_until_ms);

-- PRICES AND BUDGETS

-- A row is never changed; a new version of a name takes over from its `valid_from_ms`.
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

-- `key_id` 0 is the budget of the tenant itself.
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

-- The version grows with every change of rate cards and budgets, by any process.
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

create trigger rate_cards_stay before delete on rate_cards
begin select raise(abort, 'rate cards are never deleted'); end;

create trigger rate_cards_never_change before update on rate_cards
begin select raise(abort, 'rate cards never change'); end;

-- THE LEDGER

-- Open requests.
create table holds (
  request_id text primary key,
  tenant_id integer not null references tenants (tenant_id),
  key_id integer not null,
  model text not null,
  started_ms integer not null,
  workspace text not null default 'default',
  tier text not null default 'standard',
  dialect text not null default '',
  epoch text not null default '',
  rate_card_id text not null default 'free',
  reserved_tokens integer not null default 0,
  reserved_pico integer not null default 0,
  booked_ms integer not null default 0,
  -- The server that keeps the hold; always 0 in a file, which has one server.
  writer_id integer not null default 0,
  -- The usage noted last, as MessagePack: the hold is settled to it if its server dies.
  progress blob
) strict, without rowid;

-- Settled requests, one entry each.
create table ledger (
  entry_id integer primary key,
  request_id text not null unique,
  tenant_id integer not null references tenants (tenant_id),
  key_id integer not null,
  model text not null,
  ending text not null,
  started_ms integer not null,
  ended_ms integer not null,
  prompt_tokens integer not null check (prompt_tokens >= 0),
  cache_read_tokens integer not null check (cache_read_tokens >= 0),
  cache_write_tokens integer not null check (cache_write_tokens >= 0),
  fresh_tokens integer not null check (fresh_tokens >= 0),
  output_tokens integer not null check (output_tokens >= 0),
  physical_cached_tokens integer not null check (physical_cached_tokens >= 0),
  reads text not null default '{}',
  writes text not null default '{}',
  workspace text not null default 'default',
  tier text not null default 'standard',
  dialect text not null default '',
  recomputed_promised_tokens integer not null default 0 check (recomputed_promised_tokens >= 0),
  ttft_ms integer check (ttft_ms >= 0),
  epoch text not null default '',
  rate_card_id text not null default 'free',
  charge_pico integer not null default 0 check (charge_pico >= 0),
  saved_pico integer not null default 0,
  -- Decides the entry's period: the start of its request, or the first instant not yet closed.
  booked_ms integer not null default 0,
  -- SHA-256 of the previous row's chain and this row.
  chain blob not null default x'',
  -- Of the cached tokens, those that were loaded from a level below the device. They are no money:
  -- the chain does not cover them.
  host_cached_tokens integer not null default 0 check (host_cached_tokens >= 0),
  disk_cached_tokens integer not null default 0 check (disk_cached_tokens >= 0),
  remote_cached_tokens integer not null default 0 check (remote_cached_tokens >= 0),
  check (prompt_tokens = cache_read_tokens + cache_write_tokens + fresh_tokens)
) strict;

create index ledger_by_tenant on ledger (tenant_id, booked_ms);

-- Lists of ended requests by tenant or by ending, newest first: a filter that matches little reads
-- what it matches, not the whole period.
create index ledger_by_tenant_request on ledger (tenant_id, request_id);

-- Most requests end well, and a list of those is short to find.
create index ledger_by_ending on ledger (ending, request_id) where ending <> 'done';

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

-- Closed days, with their totals.
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
  digest blob not null,
  -- The ledger epoch that closed the day: a close that a restored backup lacks is made again by the
  -- next epoch.
  ledger_epoch integer not null default 1
) strict;

-- The head of the chain at each change of hour.
create table seals (
  number integer primary key,
  hour_ms integer not null,
  entry_id integer not null,
  chain blob not null
) strict;

-- A restored database begins a new epoch, which explains sums that are smaller than before.
-- `entry_id`, `chain`: the last entry before the epoch.
create table ledger_epochs (
  number integer primary key check (number >= 1),
  begun_ms integer not null,
  reason text not null check (reason in ('begun', 'restored', 'marked', 'found')),
  entry_id integer not null,
  chain blob not null
) strict;

insert into ledger_epochs (number, begun_ms, reason, entry_id, chain)
  values (1, 0, 'begun', 0, x'');

create trigger ledger_entries_stay before delete on ledger
begin select raise(abort, 'ledger entries are never deleted'); end;

create trigger ledger_entries_never_change before update on ledger
begin select raise(abort, 'ledger entries never change'); end;

create trigger adjustments_stay before delete on adjustments
begin select raise(abort, 'adjustments are never deleted'); end;

create trigger adjustments_never_change before update on adjustments
begin select raise(abort, 'adjustments never change'); end;

create trigger closes_stay before delete on closes
begin select raise(abort, 'closed days stay closed'); end;

create trigger closes_never_change before update on closes
begin select raise(abort, 'closed days never change'); end;

create trigger seals_stay before delete on seals
begin select raise(abort, 'seals stay'); end;

create trigger seals_never_change before update on seals
begin select raise(abort, 'seals never change'); end;

create trigger ledger_epochs_stay before delete on ledger_epochs
begin select raise(abort, 'epochs of the ledger stay'); end;

create trigger ledger_epochs_never_change before update on ledger_epochs
begin select raise(abort, 'epochs of the ledger never change'); end;

create trigger ledger_closed before insert on ledger
when new.booked_ms < (select 86400000 * (max(day) + 1) from closes)
begin select raise(abort, 'this day is closed'); end;

create trigger adjustments_closed before insert on adjustments
when new.booked_ms < (select 86400000 * (max(day) + 1) from closes)
begin select raise(abort, 'this day is closed'); end;

-- SUMS OF THE LEDGER

-- Sums of the latest entries. An entry is added to this table alone, in its own transaction; each
-- minute the rows are moved to `usage_hours`, `usage_days` and `epoch_sums`.
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
  host_cached_tokens integer not null default 0,
  disk_cached_tokens integer not null default 0,
  remote_cached_tokens integer not null default 0,
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

-- By the hour that entries are booked in.
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
  host_cached_tokens integer not null default 0,
  disk_cached_tokens integer not null default 0,
  remote_cached_tokens integer not null default 0,
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

-- By day, so that a question about years reads few rows.
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
  host_cached_tokens integer not null default 0,
  disk_cached_tokens integer not null default 0,
  remote_cached_tokens integer not null default 0,
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

-- By the engine epoch that entries ran in; reconciliation compares them with the engine's counts.
create table epoch_sums (
  epoch text primary key,
  entries integer not null,
  prompt_tokens integer not null,
  physical_cached_tokens integer not null,
  output_tokens integer not null,
  last_ended_ms integer not null
) strict, without rowid;

-- The engine's own counts (`*_tokens`) and the gateway's (`metric_*`), by engine epoch.
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

-- The meters of storage, one of each gateway that runs, and the number of the last readings that
-- were counted: readings that are written again count once.
create table storage_meters (
  meter text not null primary key,
  number integer not null check (number >= 0),
  seen_ms integer not null
) strict, without rowid;

-- HISTORY AND FINDINGS

-- One row for each minute and each tenant that was active in it, and one for `tenant_id` 0, which
-- has the sums of all tenants and tells that the gateway ran. After two days the minutes of an hour
-- become one row. `gateway` is the gateway that counted; '' where a file has one. `minutes`: how
-- many minutes the row sums. Blocks are means, null without an engine. `details`: refusals by code
-- and times to first token, as MessagePack.
create table history_samples (
  tenant_id integer not null,
  span_ms integer not null check (span_ms in (60000, 3600000)),
  at_ms integer not null,
  gateway text not null,
  minutes integer not null check (minutes > 0),
  refused integer not null check (refused >= 0),
  blocks_promised integer,
  blocks_cached integer,
  blocks_free integer,
  details blob not null,
  primary key (tenant_id, span_ms, at_ms, gateway)
) strict, without rowid;

create index history_samples_by_time on history_samples (span_ms, at_ms);

-- Ended requests, refused ones too: what the ledger does not hold, as MessagePack. Ids begin with
-- the time at which the request was received. `tenant_id` 0: no valid key.
create table request_records (
  request_id text primary key,
  tenant_id integer not null,
  code text not null,
  record blob not null
) strict, without rowid;

create index request_records_by_tenant on request_records (tenant_id, request_id);

-- The end user that a request named, where usage is attributed to users. Written beside the ledger
-- and not chained: without a row, an entry counts for no user. `user_ref`: as the client sent it,
-- or a digest of a longer text.
create table request_users (
  request_id text primary key,
  tenant_id integer not null references tenants (tenant_id),
  user_ref text not null
) strict;

create index request_users_by_tenant on request_users (tenant_id);

-- Findings: why prompts were computed, or paid for, again, counted by hour, cause and place. A row
-- holds names of causes and of request fields, numbers and request ids, never text. `place`: the
-- field of the request, or another place that the cause names. `examples`: request ids, and
-- `facts`: sums by name, both as JSON.
create table findings (
  tenant_id integer not null references tenants (tenant_id),
  hour_ms integer not null,
  model text not null,
  cause text not null,
  place text not null,
  requests integer not null check (requests >= 0),
  wasted_tokens integer not null check (wasted_tokens >= 0),
  first_ms integer not null,
  last_ms integer not null,
  examples text not null,
  facts text not null,
  primary key (tenant_id, hour_ms, model, cause, place)
) strict;

create index findings_by_hour on findings (hour_ms);

-- The model and the template (digests) that a tenant's latest prompts were made for, since when,
-- and those before them: a change of either makes all prefixes new. `gateway`: the one that served
-- them; '' where a file has one.
create table prompt_origins (
  gateway text not null,
  tenant_id integer not null references tenants (tenant_id),
  model text not null,
  template text not null,
  since_ms integer not null,
  model_before text not null,
  template_before text not null,
  primary key (gateway, tenant_id)
) strict;

-- ADMINISTRATION

-- Changes that administrators and commands made: by which key or user, on what, and its values
-- before and after, as JSON. `tenant_id` is the tenant concerned, if there is one; a name stands in
-- no row, so a deleted tenant leaves none here.
create table audit_log (
  audit_id integer primary key autoincrement,
  at_ms integer not null,
  actor text not null check (actor in ('admin_key', 'command', 'file', 'trusted_header')),
  actor_id text not null,
  address text not null default '',
  action text not null,
  tenant_id integer,
  target text not null,
  before_values text,
  after_values text
) strict;

create index audit_log_by_time on audit_log (at_ms);

create index audit_log_by_tenant on audit_log (tenant_id, audit_id) where tenant_id is not null;

-- A record of a deleted tenant loses its values; nothing else changes.
create trigger audit_log_never_changes before update on audit_log
when new.audit_id <> old.audit_id or new.at_ms <> old.at_ms or new.actor <> old.actor
  or new.actor_id <> old.actor_id or new.address <> old.address or new.action <> old.action
  or new.target <> old.target
  or new.tenant_id is not old.tenant_id
  or (new.before_values is not null and new.before_values is not old.before_values)
  or (new.after_values is not null and new.after_values is not old.after_values)
begin select raise(abort, 'the audit log never changes'); end;

-- Events that wait to be sent to the operator's webhooks, and the recent ones that were sent.
-- `event_id` derives from what happened, so that an event that two gateways, or two lives of one
-- gateway, notice is one row. `endpoint`: the name of the webhook in the configuration. `body`:
-- JSON as sent. `next_ms`: the time of the next attempt; during one, the time at which another
-- sender may take it over.
create table webhook_deliveries (
  event_id text not null,
  endpoint text not null,
  event_type text not null,
  tenant_id integer references tenants (tenant_id),
  body blob not null,
  created_ms integer not null,
  attempts integer not null default 0 check (attempts >= 0),
  next_ms integer not null,
  state text not null default 'pending' check (state in ('pending', 'delivered', 'dead')),
  last_status integer,
  last_error text,
  ended_ms integer,
  primary key (event_id, endpoint)
) strict;

create index webhook_deliveries_by_due on webhook_deliveries (endpoint, state, next_ms);

create index webhook_deliveries_by_time on webhook_deliveries (created_ms);

create index webhook_deliveries_by_tenant on webhook_deliveries (tenant_id);
