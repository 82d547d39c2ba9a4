-- Responses that clients continue by id. Their rows are content: they are deleted at their expiry
-- and with every erasure of their tenant's cache.

-- `thread_id`: the first response of the chain of `previous_id`. `input` holds
-- the request's own items and `response` the response, both as JSON. `bytes` counts both, and
-- `thread_bytes` also those of all earlier responses of the chain.
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
