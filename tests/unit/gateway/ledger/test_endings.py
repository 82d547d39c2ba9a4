"""Every ending of a request has a payer, and the page on billing says the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import engine
from engine.core.core import FAILURES
from engine.errors import __doc__ as engine_errors
from gateway.http.error_mapping import engine_refusal
from tenancy.pricing.charges import PAYERS

ENGINE = Path(engine.__file__).parent
BILLING = ENGINE.parent / "docs" / "billing.md"
RAISED = {"EngineUnavailable": 0, "RequestRefused": 0, "Finished": 3, "ForcedEnding": 2}
"""Calls that name a code of a request's ending, and the place of the code among their arguments."""
OF_ENGINES = {
    *("not_found", "unsupported", "corrupt", "digest_mismatch", "unreachable", "storage"),
    "invariant",
}
"""Codes of models that cannot be loaded, where no request has begun, and of an engine that dies:
its requests end with `engine_died`."""


def codes_raised() -> Iterator[str]:
    """Yield the codes that the engine's source names in `RAISED` calls."""
    for path in sorted(ENGINE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                place = RAISED.get(node.func.id, len(node.args))
                code = node.args[place] if place < len(node.args) else None
                if isinstance(code, ast.Constant) and isinstance(code.value, str) and code.value:
                    yield code.value


def stable_codes() -> set[str]:
    """Return the codes that the engine's errors document, without those of whole engines."""
    listed = str(engine_errors).partition("Stable codes:")[2]
    return set(re.findall(r"[a-z_]+", listed)) - OF_ENGINES


def test_every_ending_has_a_payer() -> None:
    """A new code must choose: an entry has the engine's code or the code that the client saw."""
    codes = stable_codes() | set(codes_raised()) | FAILURES.keys()
    seen = {engine_refusal(code, "").code for code in codes}

    assert len(codes) > 15
    assert {"done", "cancelled", "failed", "interrupted", "ledger_unavailable"} <= PAYERS.keys()
    assert (codes | seen) - PAYERS.keys() == set()


def test_every_schema_ending_is_the_clients() -> None:
    """A schema that fails behind the text that was wanted must not make the text free."""
    schemas = {code for code in stable_codes() | FAILURES.keys() if code.startswith("grammar_")}
    seen = {engine_refusal(code, "").code for code in schemas}

    assert {PAYERS[code] for code in schemas | seen} == {"client"}


def test_billing_page_has_every_ending() -> None:
    """The table tells who pays for what."""
    told: dict[str, str] = {}
    for line in BILLING.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and cells[1] in ("client", "operator"):
            told |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), cells[1])

    assert told == PAYERS
