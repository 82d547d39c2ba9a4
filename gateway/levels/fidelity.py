"""Read the header with which a request restricts how far copies of its KV may be from exact.

A request may only be stricter than its tenant's setting. Without the header it gets the tenant's.
If a model's engine keeps KV in 8 bits, it has nothing better: a request for better is refused, and
all others read it in the answer's header. Pure: `gateway.generation.generation` and the quote
handler call it with the header's values before they parse the body, and `prepare` checks what was
asked once the model is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.errors import Kind, Refusal
from tenancy.types import FIDELITIES, Fidelity

FIDELITY_HEADER = "X-Trunkline-Fidelity"
SHOWN_CHARS_MAX = 32
"""Characters of a wrong value that its error repeats."""


def parse_fidelity(values: Sequence[str], least: Fidelity) -> Fidelity | None:
    """Return the fidelity that a request's headers ask for; None without the header.

    `least`: the tenant's, the least strict that the request may ask for.

    Raises Refusal for a value that is not one of the words, for a header that is sent twice, and
    for a fidelity that is less strict than the tenant's.
    """
    if not values:
        return None
    words, expected = [one for one in FIDELITIES if one in values], ", ".join(FIDELITIES)
    if len(values) > 1 or not words:
        given = "sent twice" if len(values) > 1 else repr(values[0][:SHOWN_CHARS_MAX])
        message = f"{FIDELITY_HEADER}: {given}; expected one of: {expected}."
        raise Refusal(Kind.BAD, "invalid_value", message, param=FIDELITY_HEADER)
    (asked,) = words
    if FIDELITIES.index(asked) > FIDELITIES.index(least):
        allowed = ", ".join(FIDELITIES[: FIDELITIES.index(least) + 1])
        message = f"{FIDELITY_HEADER}: {asked!r} is not allowed; expected one of: {allowed}."
        raise Refusal(Kind.BAD, "fidelity_not_allowed", message, param=FIDELITY_HEADER)
    return asked


def check_fidelity(asked: Fidelity, kept: Fidelity, model: str) -> None:
    """Raise Refusal if a request asks for better than the KV that a model's engine computes
    with. `kept`: that KV's fidelity."""
    if FIDELITIES.index(asked) >= FIDELITIES.index(kept):
        return
    message = (
        f"{FIDELITY_HEADER}: {asked!r} is not available from {model!r}, whose KV is kept in fewer"
        f" bits ({kept}); leave the header out, or use another model."
    )
    raise Refusal(Kind.BAD, "fidelity_not_available", message, param=FIDELITY_HEADER)
