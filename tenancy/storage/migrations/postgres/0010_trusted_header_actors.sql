-- Administrators that a trusted proxy names are a kind of actor of the audit log.
alter table audit_log drop constraint audit_log_actor_check;

alter table audit_log add constraint audit_log_actor_check
  check (actor in ('admin_key', 'command', 'file', 'trusted_header'));
