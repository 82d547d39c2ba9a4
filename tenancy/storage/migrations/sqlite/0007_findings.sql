-- Findings: why prompts were computed, or paid for, again, counted by hour, cause and place. A row
-- holds names of causes and of request fields, numbers and request ids, never text.

-- `place`: the field of the request, or another place that the cause names. `examples`: request ids,
-- and `facts`: sums by name, both as JSON.
create table findings (
  tenant_id integer not null references tenants (tenant_id),
  hour_ms integer not null,
  model text not null,
  cause text not null,
  place text not null,
  requests integer not null check (requests >= 0),
  wasted_tokens integer not null check (wasted_tokens >= 0),
  first_ms integer not null,
  last_ms integer not null,
  examples text not null,
  facts text not null,
  primary key (tenant_id, hour_ms, model, cause, place)
) strict;

create index findings_by_hour on findings (hour_ms);

-- The model and the template (digests) that a tenant's latest prompts were made for, since when, and
-- those before them: a change of either makes all prefixes new. `gateway`: the one that served them;
-- '' where a file has one.
create table prompt_origins (
  gateway text not null,
  tenant_id integer not null references tenants (tenant_id),
  model text not null,
  template text not null,
  since_ms integer not null,
  model_before text not null,
  template_before text not null,
  primary key (gateway, tenant_id)
) strict;
