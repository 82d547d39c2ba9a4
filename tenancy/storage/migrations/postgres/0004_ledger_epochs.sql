-- Lives of the ledger. A database that was restored begins a new one, so that sums which are smaller
-- than they were say why. `entry_id`, `chain`: the last entry before it.
create table ledger_epochs (
  number bigint primary key check (number >= 1),
  begun_ms bigint not null,
  reason text collate "C" not null check (reason in ('begun', 'restored', 'marked', 'found')),
  entry_id bigint not null,
  chain bytea not null
);

insert into ledger_epochs (number, begun_ms, reason, entry_id, chain) values (1, 0, 'begun', 0, '');

create trigger ledger_epochs_stay before delete on ledger_epochs
  for each row execute function refused('epochs of the ledger stay');
create trigger ledger_epochs_stay_together before truncate on ledger_epochs
  for each statement execute function refused('epochs of the ledger stay');
create trigger ledger_epochs_never_change before update on ledger_epochs
  for each row execute function refused('epochs of the ledger never change');

-- Which life of the ledger closed a day: one that a backup did not have is closed again by the next.
alter table closes add column ledger_epoch bigint not null default 1;
