-- Conversations, which clients make and responses append their items to. Their rows are content:
-- they are deleted at their expiry and with every erasure of their tenant's cache.

-- `positions`: items that were ever appended, so the position of the next one. `bytes` counts the
-- metadata and all items. `metadata` is JSON.
create table conversations (
  conversation_id text collate "C" not null unique,
  tenant_id bigint not null references tenants (tenant_id),
  workspace text collate "C" not null,
  created_ms bigint not null,
  expires_ms bigint not null,
  positions bigint not null check (positions >= 0),
  bytes bigint not null check (bytes >= 0),
  metadata bytea not null
);

create index conversations_by_owner on conversations (tenant_id, workspace);

create index conversations_by_expiry on conversations (expires_ms);

-- `item` is the item's JSON with its id, as it is listed.
create table conversation_items (
  conversation_id text collate "C" not null references conversations (conversation_id),
  position bigint not null,
  item_id text collate "C" not null unique,
  bytes bigint not null check (bytes >= 0),
  item bytea not null,
  unique (conversation_id, position)
);
