"""Tenants and their settings: find, create, change and suspend them.

The module knows no HTTP and no engine. `authentication` keeps all tenants in memory.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct, structs

from tenancy.accounts.keys import (
    check_name,
    create_admin_key,
    create_key,
    decode_limits,
    encode_limits,
)
from tenancy.errors import BadName
from tenancy.ledger import idempotency
from tenancy.limits import check_limits
from tenancy.pseudonyms import PSEUDONYM_PREFIX, check_not_deleted, is_pseudonym
from tenancy.storage.audit_log import Actor, record
from tenancy.storage.interface import ALL_ROWS, Row, RowReader, Store, Transaction
from tenancy.types import (
    AT_REST,
    ATTENTION_WORDS,
    FIDELITIES,
    SINK_TOKENS_MAX,
    WINDOW_TOKENS_MAX,
    WINDOW_TOKENS_MIN,
    CachePolicy,
    Limits,
    Status,
    Tenant,
    TenantSettings,
    WallClock,
)

DEFAULT_TENANT = "default"
"""The name of the tenant that the first start creates."""
BLOCKS_MAX = 2**40
PRIORITY_MAX = 1_000_000
WEIGHT_MAX = 1e6
CLASSES_MAX = 16
BOOTSTRAP_LABEL = "made on first start"
"""The label of keys that the first start creates."""


class TenantRecord(Struct, frozen=True):
    """A tenant with its cache policy and its limits."""

    tenant: Tenant
    policy: CachePolicy
    limits: Limits

    @property
    def settings(self) -> TenantSettings:
        """The settings in one flat struct."""
        return TenantSettings(
            tier=self.tenant.tier, **structs.asdict(self.policy), **structs.asdict(self.limits)
        )


# --- queries -------------------------------------------------------------------------------------

_POLICY = CachePolicy.__struct_fields__
_TENANTS = (
    "select tenant_id, name, status, created_ms, tier, is_declared, limits,"
    f" {', '.join(_POLICY)} from tenants"
)


def list_tenant_records(store: Store, after: str = "", limit: int = ALL_ROWS) -> list[TenantRecord]:
    """Return tenants with their settings, by name. `after`: the name of the last one before them.
    Raises StoreError."""
    wanted = " where name > ? order by name limit ?"
    return [_record_of(row) for row in store.query(_TENANTS + wanted, (after, limit))]


def list_tenants(store: Store) -> list[Tenant]:
    """Return all tenants, by name."""
    return [one.tenant for one in list_tenant_records(store)]


def floor_blocks_of(one: TenantRecord) -> int:
    """Return the floor that the tenant is guaranteed now: 0 while it is suspended."""
    return one.policy.floor_blocks if one.tenant.status == "active" else 0


def oldest_tenant_ms(store: Store) -> int | None:
    """Return when the oldest tenant was made; None without tenants. O(tenants). Raises
    StoreError."""
    (found,) = store.query("select min(created_ms) from tenants")
    oldest_ms: int | None = found[0]
    return oldest_ms


def write_floor_blocks_max(store: Store, blocks: int) -> None:
    """Store how many blocks of the present pool floors may take. Raises StoreError."""
    with store.change() as db:
        db.execute(
            "insert into engine_pool (one, floor_blocks_max) values (1, ?)"
            " on conflict (one) do update set floor_blocks_max = excluded.floor_blocks_max",
            (blocks,),
        )


def read_floor_blocks_max(store: Store) -> int | None:
    """Return the value stored last, or None before an engine has run."""
    found = store.query("select floor_blocks_max from engine_pool")
    return found[0][0] if found else None


def read_tenant_records(store: Store, tenant_ids: Iterable[int]) -> list[TenantRecord]:
    """Return the tenants with these ids; unknown ids are left out. O(ids)."""
    sql = f"{_TENANTS} where tenant_id = ?"
    return [_record_of(row) for one in tenant_ids for row in store.query(sql, (one,))]


def find_tenant_record(store: Store, name: str) -> TenantRecord:
    """Return a tenant with its settings by name. Raises BadName, which lists known names."""
    return find_tenant_in(store.query, name)


def find_tenant(store: Store, name: str) -> Tenant:
    """Return a tenant by name. Raises BadName, which lists known names."""
    return find_tenant_record(store, name).tenant


# --- changes -------------------------------------------------------------------------------------

TenantCheck = Callable[[Sequence[TenantRecord]], None]
"""A check of all tenants that have floors, before a change.

It runs within the change's transaction, so no other change can come between.
"""


def create_tenant(
    store: Store,
    clock: WallClock,
    name: str,
    policy: CachePolicy | None = None,
    *,
    tier: str = "standard",
    limits: Limits | None = None,
    check: TenantCheck | None = None,
    by: Actor | None = None,
) -> Tenant:
    """Create a tenant. `by`: for the audit log.

    Raises BadName if the name is invalid or taken or a setting is invalid, and what `check`
    raises.
    """
    made = TenantRecord(
        Tenant(0, name, "active", clock(), tier), policy or CachePolicy(), limits or Limits()
    )
    with store.change() as db:
        if check is not None:
            check(_tenants_with_floors(db))
        tenant_id = insert_tenant(db, made)
        values = made.settings
        record(db, by, "tenant.create", f"tenant:{tenant_id}", tenant_id=tenant_id, after=values)
        return find_tenant_in(db.rows, name).tenant


def change_tenant(
    store: Store,
    name: str,
    changes: Mapping[str, object],
    status: Status | None = None,
    *,
    check: TenantCheck | None = None,
    by: Actor | None = None,
) -> TenantRecord:
    """Change the named fields of `TenantSettings`, and the status, from the next request.

    Fields that are not named keep their values, also under concurrent changes. A new status applies
    to the tenant's keys within a second. Suspension deletes the tenant's stored responses. `by`:
    for the audit log. Raises BadName, and what `check` raises, with nothing changed.
    """
    with store.change() as db:
        found = find_tenant_in(db.rows, name)
        check_not_deleted(name)
        if changes and found.tenant.is_declared:
            raise BadName(
                "tenant_declared",
                f"tenant is declared in the configuration file: {name}; change it there and reload",
            )
        tenant_id = found.tenant.tenant_id
        if check is not None:
            check(_tenants_with_floors(db))
        if changes:
            write_settings(db, tenant_id, with_changes(found.settings, changes))
        if status is not None:
            db.execute("update tenants set status = ? where tenant_id = ?", (status, tenant_id))
        if status == "suspended":
            idempotency.forget(db, tenant_id)
        changed, target = find_tenant_in(db.rows, name), f"tenant:{tenant_id}"
        before, after = _audited(found), _audited(changed)
        record(db, by, "tenant.change", target, tenant_id=tenant_id, before=before, after=after)
        return changed


def _tenants_with_floors(db: Transaction) -> list[TenantRecord]:
    return [_record_of(row) for row in db.rows(f"{_TENANTS} where floor_blocks > 0")]


def _audited(one: TenantRecord) -> dict[str, object]:
    return {**structs.asdict(one.settings), "status": one.tenant.status}


def set_status(store: Store, name: str, status: Status, by: Actor | None = None) -> None:
    """Set the tenant's status; see `change_tenant`."""
    change_tenant(store, name, {}, status, by=by)


def bootstrap(store: Store, clock: WallClock) -> str | None:
    """Create the default tenant in an empty store and return its key; otherwise return None."""
    if list_tenants(store):
        return None
    tenant = create_tenant(store, clock, DEFAULT_TENANT)
    return create_key(store, clock, tenant.tenant_id, label=BOOTSTRAP_LABEL)


def bootstrap_admin(store: Store, clock: WallClock) -> str | None:
    """Create an administrator's key and return it, unless the store ever had one."""
    if store.query("select 1 from keys where tenant_id is null limit 1"):
        return None
    return create_admin_key(store, clock, label=BOOTSTRAP_LABEL)


def with_changes(settings: TenantSettings, changes: Mapping[str, object]) -> TenantSettings:
    """Return the settings with changes. Raises BadName for an unknown field or an invalid value."""
    for name, words in (("fidelity", FIDELITIES), ("at_rest", AT_REST)):
        word = changes.get(name, words[0])
        if isinstance(word, str) and word not in words:
            expected = ", ".join(map(repr, words))
            raise BadName("bad_setting", f"{name}: {word[:80]!r}; expected one of {expected}")
    try:
        return msgspec.convert({**structs.asdict(settings), **changes}, TenantSettings)
    except msgspec.ValidationError as error:
        raise BadName("bad_setting", str(error).replace("`$.", "`")) from error


def insert_tenant(db: Transaction, made: TenantRecord) -> int:
    """Insert a tenant within the caller's transaction; return its id. Raises BadName."""
    tenant = made.tenant
    check_new_name(tenant.name)
    check_settings(made.settings)
    if db.rows("select 1 from tenants where name = ?", (tenant.name,)):
        raise BadName("name_taken", f"tenant name is taken: {tenant.name!r}")
    found = db.rows(
        "insert into tenants (name, status, created_ms, is_declared) values (?, ?, ?, ?)"
        " returning tenant_id",
        (tenant.name, tenant.status, tenant.created_ms, tenant.is_declared),
    )
    write_settings(db, found[0][0], made.settings)
    return int(found[0][0])


def check_new_name(name: str) -> None:
    """Raise BadName if a new tenant may not have the name."""
    check_name(name, "tenant")
    if is_pseudonym(name):
        raise BadName(
            "bad_name", f"names that begin with {PSEUDONYM_PREFIX} are reserved for deleted tenants"
        )


def write_settings(db: Transaction, tenant_id: int, settings: TenantSettings) -> None:
    """Write a tenant's settings within the caller's transaction. Raises BadName."""
    check_settings(settings)
    row = {
        **structs.asdict(settings.policy),
        "classes": None if settings.classes is None else " ".join(settings.classes),
        "tier": settings.tier,
        "limits": encode_limits(settings.limits),
    }
    columns = ", ".join(f"{name} = ?" for name in row)
    db.execute(f"update tenants set {columns} where tenant_id = ?", (*row.values(), tenant_id))


def check_settings(settings: TenantSettings) -> None:
    """Raise BadName if a setting is out of range."""
    check_name(settings.tier, "tier")
    check_limits(settings.limits)
    for name, least, most in _RANGES:
        value = getattr(settings, name)
        if value is not None and not least <= value <= most:
            raise BadName("bad_policy", f"{name} out of range: {value}; expected {least} to {most}")
    floor, ceiling = settings.floor_blocks, settings.ceiling_blocks
    if ceiling is not None and ceiling < floor:
        raise BadName(
            "bad_policy", f"ceiling_blocks is below the floor: {ceiling}; expected at least {floor}"
        )
    if not 0 < settings.weight <= WEIGHT_MAX:
        raise BadName(
            "bad_policy", f"weight out of range: {settings.weight}; expected above 0, at most 1e6"
        )
    if len(settings.classes or ()) > CLASSES_MAX:
        raise BadName(
            "bad_policy",
            f"too many retention classes: {len(settings.classes or ())}; limit {CLASSES_MAX}",
        )
    for name in settings.classes or ():
        check_name(name, "retention class")
    _check_attention(settings.attention)
    default = settings.default_class
    if default is not None:
        check_name(default, "retention class")
        if settings.classes is not None and default not in settings.classes:
            raise BadName(
                "bad_policy",
                f"default_class is not allowed: {default!r}; expected one of the tenant's classes:"
                f" {', '.join(settings.classes) or 'none'}",
            )


_RANGES = (
    ("floor_blocks", 0, BLOCKS_MAX),
    ("ceiling_blocks", 1, BLOCKS_MAX),
    ("promised_blocks_max", 0, BLOCKS_MAX),
    ("priority", -PRIORITY_MAX, PRIORITY_MAX),
)
_WINDOW = re.compile(r"window=([0-9]{1,7});sinks=([0-9]{1,5})")


def _check_attention(setting: str) -> None:
    """Raise BadName if a tenant's setting of attention windows is of another form, or out of
    range."""
    if setting in ATTENTION_WORDS:
        return
    found = _WINDOW.fullmatch(setting)
    if found is not None:
        window, sinks = map(int, found.groups())
        if WINDOW_TOKENS_MIN <= window <= WINDOW_TOKENS_MAX and sinks <= SINK_TOKENS_MAX:
            return
    raise BadName(
        "bad_setting",
        f"attention: {setting[:80]!r}; expected 'allowed', 'never', or 'window=W;sinks=S' with"
        f" {WINDOW_TOKENS_MIN} to {WINDOW_TOKENS_MAX} tokens of window and at most"
        f" {SINK_TOKENS_MAX} sinks",
    )


def find_tenant_in(read: RowReader, name: str) -> TenantRecord:
    """Return a tenant by name, as a store or a transaction reads it. Raises BadName, which lists
    known names."""
    # The name may contain surrogates, which a database cannot store.
    encodable = name.encode(errors="replace").decode()
    for row in read(f"{_TENANTS} where name = ?", (encodable,)):
        return _record_of(row)
    names = [row[0] for row in read("select name from tenants order by name", ())]
    raise _unknown_tenant(name, names)


def _record_of(row: Row) -> TenantRecord:
    policy = dict(zip(_POLICY, row[7:], strict=True))
    if policy["classes"] is not None:
        policy["classes"] = tuple(policy["classes"].split())
    return TenantRecord(
        Tenant(*(*row[:5], bool(row[5]))), CachePolicy(**policy), decode_limits(row[6])
    )


def _unknown_tenant(name: str, names: list[str]) -> BadName:
    known = ", ".join(names[:10]) or "none"
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    close = difflib.get_close_matches(name[:80], names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    message = f"unknown tenant: {name[:80]!r}{hint} (known: {known}{more})"
    return BadName("tenant_unknown", message)
