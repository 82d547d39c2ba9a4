-- An item's id with its owner before it, so that one look-up finds an owner's items alone: an id of
-- another owner costs what an unknown one costs.
alter table conversation_items add column owned_id text collate "C" not null default '';
update conversation_items set owned_id =
  (select tenant_id || '/' || workspace || '/' || item_id from conversations
   where conversations.conversation_id = conversation_items.conversation_id);
create unique index conversation_items_owned on conversation_items (owned_id);
