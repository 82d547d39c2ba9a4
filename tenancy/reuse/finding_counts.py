"""The tables `findings` and `prompt_origins`: counts of findings, and models of earlier prompts.

A count says how many prompts of a tenant were computed, or paid for, again in one hour, because of
one cause at one place. It holds names, numbers and request ids, never text. Counts of several
gateways and of several writes add up. `gateway.findings` writes and reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct, structs

from tenancy.reuse.miss_causes import MissCause
from tenancy.storage.interface import Row, Store, Transaction, pad_to_power_of_two, placeholders
from tenancy.types import HOUR_MS

EXAMPLES_MAX = 3
"""Request ids of one count, the latest ones."""
FACTS_MAX = 32
"""Facts of one count."""
PLACES_MAX = 64
"""Places of one tenant and hour; further ones are not counted."""
HEADS_MAX = 256
"""Beginnings of one tenant's prompts that are kept for each model."""
WORKING_SET = "working_set_tokens"
"""The fact that counts the tokens of different lost prefixes of one model in one hour, divided by
what the model multiplies floors by."""
ROWS_MAX = 50_000
"""Counts that one query reads: those of the latest hours."""


FindingKey = tuple[int, int, str, str, str]


class FindingCount(Struct, frozen=True, array_like=True):
    """What prompts of one tenant added to one cause at one place in one hour: a sum of miss
    causes."""

    tenant_id: int
    hour_ms: int
    cause: str
    place: str
    requests: int = 0
    wasted_tokens: int = 0
    first_ms: int = 0
    last_ms: int = 0
    examples: tuple[str, ...] = ()
    facts: dict[str, int] = {}
    model: str = ""

    @classmethod
    def of(cls, one: MissCause) -> FindingCount:
        """Return what one request adds."""
        at_ms, examples = one.at_ms, (one.request_id,) if one.request_id else ()
        place = one.tenant_id, at_ms // HOUR_MS * HOUR_MS, one.cause, one.place
        sums = one.requests, one.wasted_tokens, at_ms, at_ms
        return cls(*place, *sums, examples, one.facts, one.model)

    @property
    def key(self) -> FindingKey:
        """The key of its row."""
        return self.tenant_id, self.hour_ms, self.model, self.cause, self.place

    def plus(self, other: FindingCount) -> FindingCount:
        """Return the sum of two counts of one cause; the first one's key stays. Facts add up; of
        the working sets of several hours the largest counts. O(facts)."""
        facts, is_other_hour = dict(self.facts), other.hour_ms != self.hour_ms
        for name, number in other.facts.items():
            if is_other_hour and name == WORKING_SET:
                facts[name] = max(facts.get(name, 0), number)
            elif is_other_hour or name in facts or len(facts) < FACTS_MAX:
                facts[name] = facts.get(name, 0) + number
        first, last = sorted((self, other), key=lambda one: one.last_ms)
        return structs.replace(
            self,
            requests=self.requests + other.requests,
            wasted_tokens=self.wasted_tokens + other.wasted_tokens,
            first_ms=min(self.first_ms, other.first_ms),
            last_ms=last.last_ms,
            examples=(*first.examples, *last.examples)[-EXAMPLES_MAX:],
            facts=facts,
        )


class ExplainedMisses(Struct, frozen=True, array_like=True):
    """What explained misses add up to since they were last taken."""

    causes: list[MissCause]
    """Of single requests."""
    counts: list[FindingCount]
    """Sums of all."""


class PromptOrigin(Struct, frozen=True):
    """The digests of the model and the template that a tenant's prompts are made for since
    `since_ms`, and of those before; "" if there were none. `heads`, `heads_before`: digests of the
    latest beginnings of prompts under the model and the one before, in hexadecimal, with spaces
    between them."""

    tenant_id: int
    model: str
    template: str
    since_ms: int
    model_before: str = ""
    template_before: str = ""
    gateway: str = ""
    """The gateway that served them, since those of one database may serve other models; "" for a
    database that has one."""
    heads: str = ""
    heads_before: str = ""

    def with_heads(self, heads: Iterable[str]) -> PromptOrigin:
        """Return the origin with more beginnings; the oldest are dropped. O(beginnings)."""
        known = dict.fromkeys([*self.heads.split(), *heads])
        return structs.replace(self, heads=" ".join([*known][-HEADS_MAX:]))


_COLUMNS = (
    *("tenant_id", "hour_ms", "cause", "place", "requests", "wasted_tokens", "first_ms", "last_ms"),
    *("examples", "facts", "model"),
)
_SUMMED = ("requests", "wasted_tokens", "first_ms", "last_ms", "examples", "facts")
_UPSERT = (
    f"insert into findings ({', '.join(_COLUMNS)}) values {placeholders(len(_COLUMNS))}"
    " on conflict (tenant_id, hour_ms, model, cause, place) do update set "
    + ", ".join(f"{name} = excluded.{name}" for name in _SUMMED)
)
_ORIGIN_COLUMNS = PromptOrigin.__struct_fields__
_UPSERT_ORIGIN = (
    f"insert into prompt_origins ({', '.join(_ORIGIN_COLUMNS)})"
    f" values {placeholders(len(_ORIGIN_COLUMNS))} on conflict (gateway, tenant_id) do update set "
    + ", ".join(
        f"{name} = excluded.{name}"
        for name in _ORIGIN_COLUMNS
        if name not in ("tenant_id", "gateway")
    )
)


def sum_counts(counts: Iterable[FindingCount], *, over_hours: bool = False) -> list[FindingCount]:
    """Return one count for each key, or for each key but its hour. O(counts)."""
    sums: dict[FindingKey, FindingCount] = {}
    for one in counts:
        key = structs.replace(one, hour_ms=0).key if over_hours else one.key
        before = sums.get(key)
        sums[key] = one if before is None else before.plus(one)
    return list(sums.values())


def add_counts(
    store: Store, counts: Iterable[FindingCount], origins: Sequence[PromptOrigin] = ()
) -> None:
    """Add counts to their rows, and replace origins, all or nothing. Tenants that are gone are left
    out. O(counts). Raises StoreError."""
    new = list(counts)
    if not new and not origins:
        return
    with store.change() as db:
        wanted = {one.tenant_id for one in new} | {one.tenant_id for one in origins}
        known = _known_tenants(db, sorted(wanted))
        rows, groups = [], dict[tuple[int, int], list[FindingCount]]()
        for one in sum_counts(new):
            groups.setdefault((one.tenant_id, one.hour_ms), []).append(one)
        for (tenant_id, hour_ms), group in groups.items():
            if tenant_id not in known:
                continue
            where = "tenant_id = ? and hour_ms = ?"
            stored = {one.key: one for one in _read(db, where, (tenant_id, hour_ms))}
            for one in group:
                before = stored.get(one.key)
                if before is not None or len(stored) < PLACES_MAX:
                    stored[one.key] = one if before is None else before.plus(one)
            changed = {one.key for one in group}
            rows += [_row(one) for key, one in stored.items() if key in changed]
        db.execute_many(_UPSERT, rows)
        kept = [structs.astuple(one) for one in origins if one.tenant_id in known]
        db.execute_many(_UPSERT_ORIGIN, kept)


def read_counts(
    store: Store, since_ms: int, until_ms: int, tenant_id: int | None = None
) -> list[FindingCount]:
    """Return the counts of the hours that begin in [since_ms, until_ms), of one tenant or of all,
    latest hours first; at most `ROWS_MAX`. Raises StoreError."""
    with store.snapshot() as db:
        return _read(
            db,
            "hour_ms >= ? and hour_ms < ? and (cast(? as bigint) is null or tenant_id = ?)"
            f" order by hour_ms desc limit {ROWS_MAX}",
            (since_ms, until_ms, tenant_id, tenant_id),
        )


def read_origins(store: Store, gateway: str = "") -> dict[int, PromptOrigin]:
    """Return the origins of one gateway's tenants by id. O(tenants). Raises StoreError."""
    rows = store.query(
        f"select {', '.join(_ORIGIN_COLUMNS)} from prompt_origins where gateway = ?", (gateway,)
    )
    return {row[0]: PromptOrigin(*row) for row in rows}


def delete_old_counts(store: Store, before_ms: int) -> None:
    """Delete the counts of hours before `before_ms`. Raises StoreError."""
    if store.query("select 1 from findings where hour_ms < ? limit 1", (before_ms,)):
        with store.change() as db:
            db.execute("delete from findings where hour_ms < ?", (before_ms,))


def _read(db: Transaction, where: str, values: Sequence[int | None]) -> list[FindingCount]:
    rows = db.rows(f"select {', '.join(_COLUMNS)} from findings where {where}", values)
    return [_count(row) for row in rows]


def _count(row: Row) -> FindingCount:
    *keys_and_sums, examples, facts, model = row
    values = (
        *keys_and_sums,
        msgspec.json.decode(examples, type=tuple[str, ...]),
        msgspec.json.decode(facts, type=dict[str, int]),
        model,
    )
    return FindingCount(*values)


def _row(count: FindingCount) -> tuple[int | str, ...]:
    values = structs.astuple(structs.replace(count, examples=(), facts={}))
    examples, facts = msgspec.json.encode(count.examples), msgspec.json.encode(count.facts)
    return (*values[:8], examples.decode(), facts.decode(), count.model)


def _known_tenants(db: Transaction, tenant_ids: Sequence[int]) -> set[int]:
    wanted = pad_to_power_of_two(tenant_ids)
    rows = db.rows(
        f"select tenant_id from tenants where tenant_id in {placeholders(len(wanted))}", wanted
    )
    return {row[0] for row in rows}
