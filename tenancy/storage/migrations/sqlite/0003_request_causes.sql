-- Why a prompt was computed, or paid for, again: what findings say of one request. Kept as long as
-- the requests' records. `place`: the field of the request, or another place that the cause names.
-- `facts`: numbers by name, as JSON.
create table request_causes (
  request_id text primary key,
  tenant_id integer not null references tenants (tenant_id),
  model text not null,
  cause text not null,
  place text not null,
  wasted_tokens integer not null check (wasted_tokens >= 0),
  facts text not null
) strict, without rowid;

create index request_causes_by_tenant on request_causes (tenant_id);
