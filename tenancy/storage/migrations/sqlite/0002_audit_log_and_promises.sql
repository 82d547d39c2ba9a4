-- Scopes of administrators, the audit log, the books of promises, and the rule that charged the
-- entries so far.

-- Scopes of an administrator's key, sorted; null for a tenant's key, and for an administrator's key
-- that has all of them.
alter table keys add column admin_scopes text;

-- Changes that administrators and commands made: by which key or user, on what, and its values
-- before and after, as JSON. `tenant_id` is the tenant concerned, if there is one; a name stands in
-- no row, so a deleted tenant leaves none here.
create table audit_log (
  audit_id integer primary key autoincrement,
  at_ms integer not null,
  actor text not null check (actor in ('admin_key', 'command', 'file')),
  actor_id text not null,
  address text not null default '',
  action text not null,
  tenant_id integer,
  target text not null,
  before_values text,
  after_values text
) strict;

create index audit_log_by_time on audit_log (at_ms);

create index audit_log_by_tenant on audit_log (tenant_id, audit_id) where tenant_id is not null;

create trigger audit_log_never_changes before update on audit_log
when new.audit_id <> old.audit_id or new.at_ms <> old.at_ms or new.actor <> old.actor
  or new.actor_id <> old.actor_id or new.action <> old.action or new.target <> old.target
  or new.tenant_id is not old.tenant_id
  or (new.before_values is not null and new.before_values is not old.before_values)
  or (new.after_values is not null and new.after_values is not old.after_values)
begin select raise(abort, 'the audit log never changes'); end;

-- Prefixes that were written in a retention class and are still promised, so that a promise
-- outlives its gateway. `gateway` is the gateway that made the promise; '' where a file has one.
-- `retention` holds the terms of the class as they were, as JSON.
create table written_prefixes (
  gateway text not null,
  namespace blob not null,
  digest blob not null,
  class text not null,
  tenant_id integer not null,
  tokens integer not null check (tokens > 0),
  retention text not null,
  -- Null: without an end.
  expires_ms integer,
  promised_until_ms integer not null,
  epoch text not null,
  writer integer not null,
  model text not null,
  template text not null,
  content blob not null,
  primary key (gateway, namespace, digest, class)
) strict, without rowid;

create index written_prefixes_by_tenant on written_prefixes (tenant_id);

create index written_prefixes_by_end on written_prefixes (promised_until_ms);

-- Rules of charging that are over, with the last entry that each one priced. Rule 1: every failure
-- was free, whatever caused it. A ledger that began later has no row.
create table charging_rules (
  rule integer primary key check (rule >= 1),
  last_entry_id integer not null
) strict;

insert into charging_rules (rule, last_entry_id)
select 1, max(entry_id) from ledger having max(entry_id) is not null;
