-- Of a receipt: the engines elsewhere that an administrator has forgotten before they had carried
-- the erasure out, as a JSON list of names.
alter table erasures add column forgotten_at text not null default '[]';
