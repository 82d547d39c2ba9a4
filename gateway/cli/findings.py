"""`trunkline advise` and `trunkline check-prompt`: what prompts cost twice, and why.

Both work without a server: the first reads the database, the second a model's tokenizer.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from engine.errors import ModelError
from engine.model_store import prepare, resolve
from gateway.cli.arguments import UsageError, named
from gateway.cli.database import database_file, open_database
from gateway.cli.result import CommandCall, CommandResult, Entry
from gateway.config import Config
from gateway.dialects.families import FAMILIES, guess_family
from gateway.errors import Refusal
from gateway.findings.causes import ONE_TIME
from gateway.findings.prompt_diff import PromptDifference, compare_prompts
from gateway.findings.report import FindingsWindow, dollars, find
from gateway.prompt import Renderer
from gateway.template_date import calendar_of
from tenancy.pricing.charges import FREE_CARD, RateCard
from tenancy.pricing.rate_cards import RateCards, load_cards
from tenancy.types import DAY_MS, wall_ms

DAYS_MAX = 90
COLUMNS = 100
BODY_BYTES_MAX = 32 * 2**20
REQUESTS = 1_000
"""Costs are shown for so many requests."""


def _add_advise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", metavar="NAME", help="only this tenant's findings")
    text = f"of the last N days, at most {DAYS_MAX} (default: 7)"
    parser.add_argument("--days", type=int, default=7, metavar="N", help=text)


def _add_check_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="A.json", help="a request body")
    parser.add_argument("second", type=Path, metavar="B.json", help="the next request's body")
    text = "the bodies' dialect (default: by their fields)"
    parser.add_argument("--dialect", choices=tuple(FAMILIES), help=text)
    parser.add_argument("--model", metavar="NAME", help="model whose template and tokenizer count")
    text = "least share of B's tokens that A must share, for exit status 0 (default: 0%%)"
    parser.add_argument("--min-shared", type=_share, default=0.0, metavar="N%", help=text)


def _advise(call: CommandCall) -> CommandResult:
    """Return the findings, those that would save most first."""
    options, config = call.options, call.config
    if not 1 <= options.days <= DAYS_MAX:
        raise UsageError(f"--days: {options.days} is out of range; expected 1 to {DAYS_MAX}")
    until_ms = wall_ms() + 1
    window = FindingsWindow.of(until_ms - options.days * DAY_MS, until_ms)
    with open_database(config) as store:
        found = find(store, window, options.tenant)
    faults = [one for one in found["findings"] if not one["legitimate"]]
    blocks = [_finding_text(one, found["pace"]) for one in faults]
    if not blocks:
        days = f"{options.days} days" if options.days > 1 else "day"
        blocks = [
            f"No finding in the last {days}: no cause that came twice wastes more than 5% of a"
            " tenant's computed tokens, as far as was seen."
        ]
    return CommandResult("\n\n".join(blocks), found)


def _check_prompt(call: CommandCall) -> CommandResult:
    """Compare two request bodies; status 1 if they share less than wanted.

    Raises UsageError for a body or a model that cannot be read.
    """
    options, config = call.options, call.config
    bodies = [_read(path) for path in (options.first, options.second)]
    try:
        renderer = _renderer(config)
        name = options.dialect or guess_family(bodies[0])
        found = compare_prompts(
            renderer,
            bodies[0],
            bodies[1],
            name,
            config.server.tolerance,
            separates_cache_key=config.caching.cache_key == "namespace",
        )
    except Refusal as error:
        where = f"{error.param}: " if error.param else ""
        raise UsageError(f"cannot render: {where}{error.message}") from error
    except (ModelError, ValueError) as error:
        raise UsageError(
            f"cannot load the model {config.served_models()[0].source}: {error}"
        ) from error
    card = _card(config, renderer.card.name)
    is_enough = found.shared_share >= options.min_shared
    data = {
        **asdict(found),
        "shared_share": round(found.shared_share, 4),
        "min_shared": options.min_shared,
        "is_enough": is_enough,
        "dialect": name,
        "model": renderer.card.name,
        **_costs(found, card),
    }
    text = _difference_text(options, found, card)
    if not is_enough:
        text += f"\nless than --min-shared {options.min_shared:.1%}"
    return CommandResult(text, data, 0 if is_enough else 1)


def _finding_text(one: dict[str, Any], pace: str) -> str:
    lines = textwrap.wrap(one["sentence"], COLUMNS, subsequent_indent="  ")
    advice = one["advice"]
    if float(one["saving_usd_month"]) > 0:
        when = "once" if one["cause"] in ONE_TIME else f"a month, {pace}"
        advice += f" Saves about ${one['saving_usd_month']} {when}."
    indent = "  "
    lines += textwrap.wrap(advice, COLUMNS, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)


@named("share", "a number from 0 to 1, or such as 50%")
def _share(text: str) -> float:
    number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= number <= 1:
        raise ValueError(text)
    return number


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            body = file.read(BODY_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if len(body) > BODY_BYTES_MAX:
        raise UsageError(f"{path} is too long; expected at most {BODY_BYTES_MAX} bytes")
    return body


def _renderer(config: Config) -> Renderer:
    name = config.served_models()[0].source
    card = prepare(name, resolve(name, config.models_dir), config.models_dir)
    return Renderer(card, calendar_of(config.templates))


def _card(config: Config, model: str) -> RateCard:
    """Return the rate card in force; the free one without a database."""
    file = database_file(config)
    if file is not None and not file.exists():
        return FREE_CARD
    with open_database(config) as store:
        return RateCards(load_cards(store)).in_force(model, "", wall_ms())


def _costs(found: PromptDifference, card: RateCard) -> dict[str, object]:
    computed = found.second_tokens - found.shared_tokens
    prompt = found.shared_tokens * card.cache_read + computed * card.input
    repeated = found.repeated_tokens * max(0, card.input - card.cache_read)
    return {
        "rate_card": card.rate_card_id,
        "cost_usd_per_1000": dollars(REQUESTS * prompt),
        "avoidable_usd_per_1000": dollars(REQUESTS * repeated),
    }


def _difference_text(options: argparse.Namespace, found: PromptDifference, card: RateCard) -> str:
    lines = [
        f"{options.first}: {found.first_tokens:,} tokens",
        f"{options.second}: {found.second_tokens:,} tokens, {found.shared_tokens:,} of them shared"
        f" ({found.shared_share:.1%})",
    ]
    if not found.cause:
        lines.append("The second prompt has nothing new before the end of the first.")
    else:
        places = [found.path or found.other_path] if found.path or found.other_path else []
        places += [] if found.character is None else [f"character {found.character + 1:,}"]
        places += [] if not found.token else [f"token {found.token + 1:,}"]
        where = f" at {', '.join(places)}" if places else ""
        lines += textwrap.wrap(f"They part{where}: {found.reason}.", COLUMNS)
    if card is not FREE_CARD:
        costs = _costs(found, card)
        lines.append(
            f"{REQUESTS:,} such prompts cost ${costs['cost_usd_per_1000']} at {card.rate_card_id},"
            f" ${costs['avoidable_usd_per_1000']} of it for tokens that repeat."
        )
    return "\n".join(lines)


COMMANDS: Mapping[str, Entry] = {
    "advise": Entry(_add_advise, _advise),
    "check-prompt": Entry(_add_check_prompt, _check_prompt),
}
