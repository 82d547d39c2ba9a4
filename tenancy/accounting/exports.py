"""Exports of the ledger: entries as CSV or Parquet, usage as CloudEvents.

Rows come in pages, so an export of millions keeps few in memory. Ids derive from request ids, so a
receiver can detect duplicates. The module writes nothing to the ledger and sends nothing.
`focus_export` has the cost rows.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from tenancy.accounting.usage import entries_of, span_of
from tenancy.errors import TenancyError
from tenancy.pricing.charges import is_charged, write_tokens_by_class
from tenancy.storage.atomic_files import atomic_write
from tenancy.storage.interface import Store
from tenancy.types import TOKEN_COLUMNS, UsageEntry, format_utc

PAGE = 2_000
"""Entries that one query reads."""
EVENT_TYPE = "llm.tokens"
"""The CloudEvents type of usage events."""
ENTRY_COLUMNS = (
    *("entry_id", "booked", "tenant"),
    *(name for name in UsageEntry.__struct_fields__ if name not in ("started_ms", "ended_ms")),
    *("started", "ended"),
)
"""The columns of an entry export."""

Rows = Iterator[dict[str, object]]


def pages(
    store: Store, tenant: str | None, since_ms: int, until_ms: int | None
) -> Iterator[tuple[int, int, str, UsageEntry]]:
    """Yield all entries booked in a period, in ledger order: (entry id, booked at, tenant,
    entry)."""
    after, last = span_of(store, tenant, since_ms, until_ms)
    while page := entries_of(store, tenant, since_ms, until_ms, after, PAGE, last):
        yield from page
        after = page[-1][0]


def entry_rows(store: Store, tenant: str | None, since_ms: int, until_ms: int | None) -> Rows:
    """Yield one row per entry, with `ENTRY_COLUMNS`. Money is whole pico-dollars."""
    for entry_id, booked_ms, name, entry in pages(store, tenant, since_ms, until_ms):
        row: dict[str, object] = structs.asdict(entry)
        started, ended = format_utc(row.pop("started_ms")), format_utc(row.pop("ended_ms"))
        row["read"], row["write"] = _json(entry.read), _json(entry.write)
        yield {
            "entry_id": entry_id,
            "booked": format_utc(booked_ms),
            "tenant": name,
            **row,
            "started": started,
            "ended": ended,
        }


def cloud_events(
    store: Store, tenant: str | None, since_ms: int, until_ms: int | None, source: str
) -> Iterator[bytes]:
    """Yield CloudEvents 1.0 as JSON lines, one for each component of an entry that has tokens.

    `source` and `id` together are unique forever. A meter sums `data.tokens` by `data.type`; a
    billing meter counts only events with `data.charged`, as failures of the server are free.
    """
    for _, booked_ms, name, entry in pages(store, tenant, since_ms, until_ms):
        charged = is_charged(entry.ending)
        for component, tokens in components(entry).items():
            event = {
                "specversion": "1.0",
                "id": f"{entry.request_id}:{component}",
                "source": source,
                "type": EVENT_TYPE,
                "subject": name,
                "time": format_utc(booked_ms),
                "datacontenttype": "application/json",
                "data": {
                    "type": component,
                    "tokens": str(tokens),
                    "model": entry.model,
                    "key_id": entry.key_id,
                    "workspace": entry.workspace,
                    "tier": entry.tier,
                    "ending": entry.ending,
                    "charged": charged,
                },
            }
            yield msgspec.json.encode(event) + b"\n"


def components(entry: UsageEntry) -> dict[str, int]:
    """Return tokens by priced component, without zeros. Their sum is all tokens of the entry."""
    counts = {
        "input": entry.fresh_tokens,
        "cache_read": entry.cache_read_tokens,
        **{f"cache_write_{name}": tokens for name, tokens in write_tokens_by_class(entry).items()},
        "output": entry.output_tokens,
    }
    return {name: tokens for name, tokens in counts.items() if tokens}


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> Iterator[bytes]:
    """Yield UTF-8 chunks of CSV with CRLF line ends and a header line."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row[name]) for name in columns])
        if buffer.tell() > 65_536:
            yield buffer.getvalue().encode()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue().encode()


def write_parquet(columns: Sequence[str], rows: Rows, path: Path) -> int:
    """Write a Parquet file, complete or not at all. Returns the number of rows.

    Raises TenancyError if pyarrow is missing, and OSError.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        message = "Parquet requires the extra `exports`: pip install 'trunkline[exports]'"
        raise TenancyError("no_parquet", message) from error
    schema = pyarrow.schema([(name, _parquet_type(pyarrow, name)) for name in columns])
    written = 0
    with atomic_write(path) as part, parquet.ParquetWriter(part, schema) as writer:
        while page := list(islice(rows, PAGE)):
            data = {name: [row[name] for row in page] for name in columns}
            writer.write_table(pyarrow.table(data, schema=schema))
            written += len(page)
    return written


_INTEGER_COLUMNS = frozenset(
    {"entry_id", "tenant_id", "key_id", "ttft_ms", "charge_pico", "saved_pico", *TOKEN_COLUMNS}
)


def _parquet_type(pyarrow: Any, name: str) -> object:
    return pyarrow.int64() if name in _INTEGER_COLUMNS else pyarrow.string()


# The wide ones too, as East Asian keyboards make them.
_FORMULA_CHARS = frozenset("=+-@\t\r\n＝＋－＠")
_NUMBER = re.compile(r"-[0-9]+(\.[0-9]+)?", re.ASCII)


def _cell(value: object) -> object:
    """Return a CSV cell. Text that a spreadsheet would run as a formula is quoted."""
    is_risky = isinstance(value, str) and value[:1] in _FORMULA_CHARS
    if is_risky and not _NUMBER.fullmatch(str(value)):
        return f"'{value}"
    return "" if value is None else value


def _json(detail: Mapping[str, int]) -> str:
    return msgspec.json.encode(detail, order="sorted").decode()
