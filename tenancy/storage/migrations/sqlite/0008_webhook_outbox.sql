-- Events that wait to be sent to the operator's webhooks, and the recent ones that were sent.

-- `event_id` derives from what happened, so that an event that two gateways, or two lives of one
-- gateway, notice is one row. `endpoint`: the name of the webhook in the configuration. `body`: JSON
-- as sent. `next_ms`: the time of the next attempt; during one, the time at which another sender may
-- take it over.
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
