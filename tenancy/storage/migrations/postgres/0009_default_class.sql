-- The retention class of a tenant's requests that name none; null leaves it to their API.
alter table tenants add column default_class text collate "C";
