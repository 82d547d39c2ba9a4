-- What a request was known to have used when it was noted last, as MessagePack: what it is settled to
-- if its server dies.
alter table holds add column progress bytea;
