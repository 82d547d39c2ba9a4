-- How the gateway treats request fields that it does not honour; null leaves it to the server.
alter table keys add column tolerance text collate "C"
  check (tolerance in ('standard', 'strict', 'lenient'));
