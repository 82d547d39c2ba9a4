-- Conversations, which clients make and responses append their items to. Their rows are content:
-- they are deleted at their expiry and with every erasure of their tenant's cache.

-- `positions`: items that were ever appended, so the position of the next one. `bytes` counts the
-- metadata and all items. `metadata` is JSON.
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
