"""Amounts of money on the command line: decimal dollars there, exact integers everywhere else."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from gateway.cli.arguments import UsageError, named


@named("amount", "dollars, such as 0.30 or 20")
def amount_of_dollars(text: str) -> Decimal:
    """Return the amount of an option, from 0 to 10**12 dollars."""
    try:
        amount = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(text) from error
    if not amount.is_finite() or amount < 0 or amount > 10**12 or len(text) > 40:
        raise ValueError(text)
    return amount


def whole_micros(amount: Decimal | None, what: str) -> int | None:
    """Return whole micro-dollars; None for no amount. `what`: the option. Raises UsageError."""
    if amount is None:
        return None
    micros = amount.scaleb(6)
    if micros != int(micros):
        raise UsageError(f"{what}: {amount} dollars are not whole micro-dollars")
    return int(micros)
