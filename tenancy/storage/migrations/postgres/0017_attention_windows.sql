-- Whether a tenant's requests may ask for attention windows ('allowed', 'never'), or the window of
-- those that ask for nothing ('window=W;sinks=S').
alter table tenants add column attention text collate "C" not null default 'allowed'
  check (attention in ('allowed', 'never') or substr(attention, 1, 7) = 'window=');
