-- Events that wait to be sent to the operator's webhooks, and the recent ones that were sent.

-- `event_id` derives from what happened, so that an event that two gateways, or two lives of one
-- gateway, notice is one row. `endpoint`: the name of the webhook in the configuration. `body`: JSON
-- as sent. `next_ms`: the time of the next attempt; during one, the time at which another sender may
-- take it over.
create table webhook_deliveries (
  event_id text collate "C" not null,
  endpoint text collate "C" not null,
  event_type text collate "C" not null,
  tenant_id bigint references tenants (tenant_id),
  body bytea not null,
  created_ms bigint not null,
  attempts bigint not null default 0 check (attempts >= 0),
  next_ms bigint not null,
  state text collate "C" not null default 'pending' check (state in ('pending', 'delivered', 'dead')),
  last_status bigint,
  last_error text collate "C",
  ended_ms bigint,
  primary key (event_id, endpoint)
);

create index webhook_deliveries_by_due on webhook_deliveries (endpoint, state, next_ms);

create index webhook_deliveries_by_time on webhook_deliveries (created_ms);

create index webhook_deliveries_by_tenant on webhook_deliveries (tenant_id);
