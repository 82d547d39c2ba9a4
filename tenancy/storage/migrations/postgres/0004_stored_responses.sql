-- Responses that clients continue by id. Their rows are content: they are deleted at their expiry
-- and with every erasure of their tenant's cache.

-- `thread_id`: the first response of the chain of `previous_id`. `input` holds
-- the request's own items and `response` the response, both as JSON. `bytes` counts both, and
-- `thread_bytes` also those of all earlier responses of the chain.
create table stored_responses (
  response_id text collate "C" not null unique,
  tenant_id bigint not null references tenants (tenant_id),
  workspace text collate "C" not null,
  thread_id text collate "C" not null,
  previous_id text collate "C",
  created_ms bigint not null,
  expires_ms bigint not null,
  bytes bigint not null check (bytes >= 0),
  thread_bytes bigint not null check (thread_bytes >= bytes),
  input bytea not null,
  response bytea not null
);

create index stored_responses_by_owner on stored_responses (tenant_id, workspace);

create index stored_responses_by_thread on stored_responses (thread_id);

create index stored_responses_by_expiry on stored_responses (expires_ms);

-- Sums of `stored_responses` by tenant, so that a request need not count rows.
create table stored_sums (
  tenant_id bigint primary key references tenants (tenant_id),
  responses bigint not null check (responses >= 0),
  bytes bigint not null check (bytes >= 0)
);
