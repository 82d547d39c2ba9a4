-- Administrators that a trusted proxy names are a kind of actor of the audit log. A check of a table
-- cannot be changed in SQLite: the table is written anew, with its numbers.

create table audit_log_anew (
  audit_id integer primary key autoincrement,
  at_ms integer not null,
  actor text not null check (actor in ('admin_key', 'command', 'file', 'trusted_header')),
  actor_id text not null,
  address text not null default '',
  action text not null,
  tenant_id integer,
  target text not null,
  before_values text,
  after_values text
) strict;

insert into audit_log_anew
  (audit_id, at_ms, actor, actor_id, address, action, tenant_id, target, before_values,
   after_values)
select audit_id, at_ms, actor, actor_id, address, action, tenant_id, target, before_values,
   after_values
from audit_log;

-- The number of a deleted record is not given again.
delete from sqlite_sequence where name = 'audit_log_anew';

insert into sqlite_sequence (name, seq)
select 'audit_log_anew', seq from sqlite_sequence where name = 'audit_log';

drop table audit_log;

alter table audit_log_anew rename to audit_log;

create index audit_log_by_time on audit_log (at_ms);

create index audit_log_by_tenant on audit_log (tenant_id, audit_id) where tenant_id is not null;

create trigger audit_log_never_changes before update on audit_log
when new.audit_id <> old.audit_id or new.at_ms <> old.at_ms or new.actor <> old.actor
  or new.actor_id <> old.actor_id or new.action <> old.action or new.target <> old.target
  or new.tenant_id is not old.tenant_id
  or (new.before_values is not null and new.before_values is not old.before_values)
  or (new.after_values is not null and new.after_values is not old.after_values)
begin select raise(abort, 'the audit log never changes'); end;
