-- Why a prompt was computed, or paid for, again: what findings say of one request. Kept as long as
-- the requests' records. `place`: the field of the request, or another place that the cause names.
-- `facts`: numbers by name, as JSON.
create table request_causes (
  request_id text collate "C" primary key,
  tenant_id bigint not null references tenants (tenant_id),
  model text collate "C" not null,
  cause text collate "C" not null,
  place text collate "C" not null,
  wasted_tokens bigint not null check (wasted_tokens >= 0),
  facts text collate "C" not null
);

create index request_causes_by_tenant on request_causes (tenant_id);
