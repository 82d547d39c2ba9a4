-- Responses and conversations that clients continue by id. Their rows are content: they are deleted
-- at their expiry and with every erasure of their tenant's cache.

-- `thread_id`: the first response of the chain of `previous_id`, or the conversation. `input` holds
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

-- `bytes` counts the items; `next_number` is the number of the next item.
create table conversations (
  conversation_id text not null unique,
  tenant_id integer not null references tenants (tenant_id),
  workspace text not null,
  metadata text not null,
  created_ms integer not null,
  expires_ms integer not null,
  bytes integer not null check (bytes >= 0),
  next_number integer not null check (next_number >= 0)
) strict;

create index conversations_by_owner on conversations (tenant_id, workspace);

create index conversations_by_expiry on conversations (expires_ms);

-- The items of a conversation in order, each as JSON.
create table conversation_items (
  conversation_id text not null references conversations (conversation_id) on delete cascade,
  number integer not null,
  item_id text not null,
  item blob not null,
  primary key (conversation_id, number)
) strict;

create unique index conversation_items_by_id on conversation_items (conversation_id, item_id);

-- Sums of both tables by tenant, so that a request need not count rows.
create table stored_sums (
  tenant_id integer primary key references tenants (tenant_id),
  objects integer not null check (objects >= 0),
  bytes integer not null check (bytes >= 0)
) strict;
