-- Digests of the beginnings (tools and system text) that a tenant's prompts had under their model,
-- and under the one before: a change of the model costs the prompts that the one before had seen.
alter table prompt_origins add column heads text not null default '';
alter table prompt_origins add column heads_before text not null default '';
