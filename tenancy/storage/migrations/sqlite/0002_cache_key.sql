-- What a key's requests mean by `prompt_cache_key`; null leaves it to the server.
alter table keys add column cache_key text check (cache_key in ('hint', 'namespace'));
