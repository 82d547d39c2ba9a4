-- Which of several servers over one database keeps a hold; there is one over a file, and it is 0.
alter table holds add column writer_id integer not null default 0;
