"""Rate cards in the database: added, never edited, selected by a request's admission time.

The newest version of a card applies from its `valid_from_ms` on and ends the version before it. Two
cards of different names may not apply to the same model, tier and instant. The module reads no
entries. `ledger.transactions` looks up prices; the command line and the admin API add cards.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct, structs

from tenancy.errors import BadPrice
from tenancy.pricing.charges import ANY, FREE_CARD, BreachCredit, RateCard, check_card
from tenancy.storage.audit_log import Actor, record
from tenancy.storage.interface import Row, Store
from tenancy.types import WallClock, format_utc

CARDS_MAX = 10_000
"""The most versions of cards in a database."""
_FIELDS = "name, version, model, tier, currency, valid_from_ms, valid_until_ms, prices"


class _Prices(Struct, frozen=True):
    """The JSON column of a card's prices."""

    input: int
    output: int
    cache_read: int
    cache_write: dict[str, int]
    storage: dict[str, int]
    minimum_charge: int
    breach_credit: BreachCredit = "none"


class RateCards:
    """All cards in memory. Immutable."""

    def __init__(self, cards: list[RateCard]) -> None:
        self._by_id = {card.rate_card_id: card for card in cards}
        self._by_scope: dict[tuple[str, str], list[list[RateCard]]] = {}
        for versions in _versions_by_name(cards).values():
            scope = (versions[0].model, versions[0].tier)
            self._by_scope.setdefault(scope, []).append(versions)

    def in_force(self, model: str, tier: str, at_ms: int) -> RateCard:
        """Return the card for a request that begins at `at_ms`. O(versions).

        A card for the model comes before one for all models, then a card for the tier before one
        for all. Without a match, the free card.
        """
        if not self._by_scope:
            return FREE_CARD
        for scope in ((model, tier), (model, ANY), (ANY, tier), (ANY, ANY)):
            for versions in self._by_scope.get(scope, ()):
                card = _version_at(versions, at_ms)
                if card is not None:
                    return card
        return FREE_CARD

    def card(self, rate_card_id: str) -> RateCard:
        """Return the card of an entry by its id. O(1)."""
        return self._by_id.get(rate_card_id, FREE_CARD)


def load_cards(store: Store) -> list[RateCard]:
    """Return all versions of all cards, by name and version."""
    return [read_card(row) for row in store.query(f"{SELECT_CARDS} order by name, version")]


def add_card(store: Store, clock: WallClock, card: RateCard, by: Actor | None = None) -> RateCard:
    """Add a card as the next version of its name. Returns it with its version.

    `valid_from_ms` 0 means now. A version never reaches into the past, so past charges stay. Raises
    BadPrice, with nothing changed.
    """
    now_ms = clock()
    if not card.valid_from_ms:
        card = structs.replace(card, valid_from_ms=now_ms)
    check_card(card)
    if card.valid_from_ms < now_ms:
        raise BadPrice(
            "rate_card_in_the_past", "valid_from_ms is in the past; expected now or later."
        )
    with store.change() as db:
        existing = [read_card(row) for row in db.rows(SELECT_CARDS)]
        if len(existing) >= CARDS_MAX:
            message = f"Too many rate card versions: {len(existing) + 1}; limit {CARDS_MAX}."
            raise BadPrice("too_many_rate_cards", message)
        own = [one for one in existing if one.name == card.name]
        if own and (own[0].model, own[0].tier, own[0].currency) != (
            card.model,
            card.tier,
            card.currency,
        ):
            raise BadPrice(
                "rate_card_scope",
                f"{card.name} is for model {own[0].model} and tier {own[0].tier} in"
                f" {own[0].currency}; expected the same, or a new name.",
            )
        card = structs.replace(card, version=1 + max((one.version for one in own), default=0))
        _check_overlaps(existing, card)
        prices = {name: getattr(card, name) for name in _Prices.__struct_fields__}
        db.execute(
            f"insert into rate_cards ({_FIELDS}, created_ms) values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(card.name, card.version, card.model, card.tier, card.currency),
                *(card.valid_from_ms, card.valid_until_ms),
                msgspec.json.encode(prices, order="sorted").decode(),
                now_ms,
            ),
        )
        record(db, by, "rate_card.add", f"rate_card:{card.rate_card_id}", after=card)
    return card


def end_card(
    store: Store, clock: WallClock, name: str, until_ms: int | None, by: Actor | None = None
) -> RateCard:
    """End the card of a name at an instant, or now (None), by a version with the prices in force.
    Returns that version. Raises BadPrice, with nothing changed."""
    now_ms, cards = clock(), load_cards(store)
    own = [one for one in cards if one.name == name]
    if not own:
        known = ", ".join(sorted({one.name for one in cards})) or "none"
        message = f"unknown rate card: {name[:80]!r}; expected one of: {known}"
        raise BadPrice("rate_card_unknown", message)
    held = _version_at(own, now_ms)
    if held is None:
        message = f"{name} does not apply now; expected a rate card in force"
        raise BadPrice("rate_card_not_in_force", message)
    ends_ms = now_ms + 1 if until_ms is None else until_ms
    if later := next((one for one in own if now_ms < one.valid_from_ms < ends_ms), None):
        message = (
            f"{later.rate_card_id} has other prices from {format_utc(later.valid_from_ms)} on;"
            " expected an end before that, or a further version with valid_until_ms"
        )
        raise BadPrice("rate_card_changes", message)
    if ends_ms <= now_ms:
        message = f"{format_utc(ends_ms)} is not in the future; expected a time to come"
        raise BadPrice("rate_card_in_the_past", message)
    ended = structs.replace(held, valid_from_ms=now_ms, valid_until_ms=ends_ms)
    return add_card(store, lambda: now_ms, ended, by)


def is_tier_free(store: Store, clock: WallClock, tier: str) -> bool:
    """Return whether cards are in force now and none of them applies to this tier. O(cards).

    A tenant of such a tier is charged nothing, which is often a mistake.
    """
    now_ms, chains = clock(), _versions_by_name(load_cards(store)).values()
    held = [card for versions in chains if (card := _version_at(versions, now_ms))]
    return bool(held) and not any(card.tier in (ANY, tier) for card in held)


SELECT_CARDS = f"select {_FIELDS} from rate_cards"


def read_card(row: Row) -> RateCard:
    """Decode a row of `SELECT_CARDS`."""
    name, version, model, tier, currency, valid_from_ms, valid_until_ms, prices = row
    return RateCard(
        name=name,
        version=version,
        model=model,
        tier=tier,
        currency=currency,
        valid_from_ms=valid_from_ms,
        valid_until_ms=valid_until_ms,
        **structs.asdict(msgspec.json.decode(prices, type=_Prices)),
    )


def _versions_by_name(cards: list[RateCard]) -> dict[str, list[RateCard]]:
    """Return the versions of each name, oldest first."""
    chains: dict[str, list[RateCard]] = {}
    for card in sorted(cards, key=lambda card: card.version):
        chains.setdefault(card.name, []).append(card)
    return chains


def _version_at(versions: list[RateCard], at_ms: int) -> RateCard | None:
    """Return the newest version that has begun, unless it has ended."""
    for card in reversed(versions):
        if card.valid_from_ms <= at_ms:
            is_over = card.valid_until_ms is not None and card.valid_until_ms <= at_ms
            return None if is_over else card
    return None


def _check_overlaps(existing: list[RateCard], card: RateCard) -> None:
    """Raise BadPrice if another card applies to the same model, tier and instant.

    Cards begin and end only at the instants checked here, so the check covers every instant.
    """
    scope = (card.model, card.tier)
    chains = _versions_by_name([one for one in existing if (one.model, one.tier) == scope] + [card])
    own_versions = chains.pop(card.name)
    for name, versions in chains.items():
        for at_ms in {one.valid_from_ms for one in (*own_versions, *versions)}:
            own, other = _version_at(own_versions, at_ms), _version_at(versions, at_ms)
            if own is card and other is not None:
                raise BadPrice(
                    "rate_cards_overlap",
                    f"{name}@{other.version} also applies to model {card.model} and tier"
                    f" {card.tier} from {at_ms} ms ({format_utc(at_ms)}); end it (trunkline prices"
                    f" end {name}), begin later, or add a version of {name}.",
                )
