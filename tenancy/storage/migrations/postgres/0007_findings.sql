-- Findings: why prompts were computed, or paid for, again, counted by hour, cause and place. A row
-- holds names of causes and of request fields, numbers and request ids, never text.

-- `place`: the field of the request, or another place that the cause names. `examples`: request ids,
-- and `facts`: sums by name, both as JSON.
create table findings (
  tenant_id bigint not null references tenants (tenant_id),
  hour_ms bigint not null,
  model text collate "C" not null,
  cause text collate "C" not null,
  place text collate "C" not null,
  requests bigint not null check (requests >= 0),
  wasted_tokens bigint not null check (wasted_tokens >= 0),
  first_ms bigint not null,
  last_ms bigint not null,
  examples text collate "C" not null,
  facts text collate "C" not null,
  primary key (tenant_id, hour_ms, model, cause, place)
);

create index findings_by_hour on findings (hour_ms);

-- The model and the template (digests) that a tenant's latest prompts were made for, since when, and
-- those before them: a change of either makes all prefixes new. `gateway`: the one that served them;
-- '' where a file has one.
create table prompt_origins (
  gateway text collate "C" not null,
  tenant_id bigint not null references tenants (tenant_id),
  model text collate "C" not null,
  template text collate "C" not null,
  since_ms bigint not null,
  model_before text collate "C" not null,
  template_before text collate "C" not null,
  primary key (gateway, tenant_id)
);
