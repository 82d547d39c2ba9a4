-- The end user that a request named, where usage is attributed to users. Written beside the ledger
-- and not chained: without a row, an entry counts for no user. `user_ref`: as the client sent it, or
-- a digest of a longer text.
create table request_users (
  request_id text collate "C" primary key,
  tenant_id bigint not null references tenants (tenant_id),
  user_ref text collate "C" not null
);

create index request_users_by_tenant on request_users (tenant_id);
