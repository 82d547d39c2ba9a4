-- Requests that clients named by an Idempotency-Key, and what was answered to them, for a time. That
-- is content, so it stands apart from the ledger, and goes with its tenant's cache. One that runs has
-- no end yet; one whose answer was too large has no body.
create table named_requests (
  tenant_id integer not null references tenants (tenant_id),
  name text not null,
  workspace text not null,
  digest blob not null check (length(digest) = 32),
  request_id text not null unique,
  until_ms integer,
  head text not null default '',
  body blob,
  unique (tenant_id, name)
) strict;

create index named_requests_by_end on named_requests (until_ms) where until_ms is not null;

-- What a tenant has of them, so that nobody has to count at each request.
create table named_sums (
  tenant_id integer primary key references tenants (tenant_id),
  names integer not null check (names >= 0),
  bytes integer not null check (bytes >= 0)
) strict;
