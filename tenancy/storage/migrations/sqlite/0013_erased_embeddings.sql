-- How many vectors of texts an erasure removed beside blocks.
alter table erasures add column embeddings integer not null default 0;
