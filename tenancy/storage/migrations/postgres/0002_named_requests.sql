-- Requests that clients named by an Idempotency-Key, and what was answered to them, for a time. That
-- is content, so it stands apart from the ledger, and goes with its tenant's cache. One that runs has
-- no end yet; one whose answer was too large has no body.
create table named_requests (
  tenant_id bigint not null references tenants (tenant_id),
  name text collate "C" not null,
  workspace text collate "C" not null,
  digest bytea not null check (length(digest) = 32),
  request_id text collate "C" not null unique,
  until_ms bigint,
  head text collate "C" not null default '',
  body bytea,
  unique (tenant_id, name)
);

create index named_requests_by_end on named_requests (until_ms) where until_ms is not null;

-- What a tenant has of them, so that nobody has to count at each request.
create table named_sums (
  tenant_id bigint primary key references tenants (tenant_id),
  names bigint not null check (names >= 0),
  bytes bigint not null check (bytes >= 0)
);
