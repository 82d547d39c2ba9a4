// Which tenants need to be looked after. one: of `/admin/v1/tenants`; the server says its status and
// the reasons, and they are those of the tenant's own page.

export const needsCare = ({ state }) => state.status !== "ok" || state.reasons.length > 0;
