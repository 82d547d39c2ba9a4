-- Lists of ended requests by tenant or by ending, newest first: a filter that matches little reads
-- what it matches, not the whole period.
create index ledger_by_tenant_request on ledger (tenant_id, request_id);

-- Most requests end well, and a list of those is short to find.
create index ledger_by_ending on ledger (ending, request_id) where ending <> 'done';
