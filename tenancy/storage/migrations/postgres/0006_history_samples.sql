-- Samples for charts over time, and records of ended requests. Both are kept for a bounded time.

-- One row for each minute and each tenant that was active in it, and one for `tenant_id` 0, which
-- has the sums of all tenants and tells that the gateway ran. After two days the minutes of an hour
-- become one row. `gateway` is the gateway that counted; '' where a file has one. `minutes`: how
-- many minutes the row sums. Blocks are means, null without an engine. `details`: refusals by code
-- and times to first token, as MessagePack.
create table history_samples (
  tenant_id bigint not null,
  span_ms bigint not null check (span_ms in (60000, 3600000)),
  at_ms bigint not null,
  gateway text collate "C" not null,
  minutes bigint not null check (minutes > 0),
  refused bigint not null check (refused >= 0),
  blocks_promised bigint,
  blocks_cached bigint,
  blocks_free bigint,
  details bytea not null,
  primary key (tenant_id, span_ms, at_ms, gateway)
);

create index history_samples_by_time on history_samples (span_ms, at_ms);

-- Ended requests, refused ones too: what the ledger does not hold, as MessagePack. Ids begin with
-- the time at which the request was received. `tenant_id` 0: no valid key.
create table request_records (
  request_id text collate "C" primary key,
  tenant_id bigint not null,
  code text collate "C" not null,
  record bytea not null
);

create index request_records_by_tenant on request_records (tenant_id, request_id);
