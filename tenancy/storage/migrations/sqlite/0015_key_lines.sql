-- Keys that were rotated are one line, named by its first key; null: the key's own. What is counted by
-- key holds for all of a line.
alter table keys add column line_id integer;

with recursive line (key_id, first_id) as (
  select replaced_by, key_id from keys as old where replaced_by is not null
    and not exists (select 1 from keys as before where before.replaced_by = old.key_id)
  union
  select keys.replaced_by, line.first_id from line join keys on keys.key_id = line.key_id
    where keys.replaced_by is not null
)
update keys set line_id = (select first_id from line where line.key_id = keys.key_id)
  where key_id in (select key_id from line);
