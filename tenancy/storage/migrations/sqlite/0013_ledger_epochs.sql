-- Lives of the ledger. A database that was restored begins a new one, so that sums which are smaller
-- than they were say why. `entry_id`, `chain`: the last entry before it.
create table ledger_epochs (
  number integer primary key check (number >= 1),
  begun_ms integer not null,
  reason text not null check (reason in ('begun', 'restored', 'marked', 'found')),
  entry_id integer not null,
  chain blob not null
) strict;

insert into ledger_epochs (number, begun_ms, reason, entry_id, chain) values (1, 0, 'begun', 0, x'');

create trigger ledger_epochs_stay before delete on ledger_epochs
begin select raise(abort, 'epochs of the ledger stay'); end;

create trigger ledger_epochs_never_change before update on ledger_epochs
begin select raise(abort, 'epochs of the ledger never change'); end;

-- Which life of the ledger closed a day: one that a backup did not have is closed again by the next.
alter table closes add column ledger_epoch integer not null default 1;
