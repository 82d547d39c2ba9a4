"""The models that one gateway serves: each has its name, its renderer and its engine.

A request's `model` selects one of them here and nowhere else. Background jobs and reports go over
all of them: a namespace contains its model, so each namespace is in one engine. The engines know
nothing of each other; the loss of one ends only its own requests. `gateway.app` makes the models,
handlers find them in `gateway.context`.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from engine.api import EngineInfo, Erased, Namespace
from engine.client.cache_event_totals import BlockMoves
from engine.errors import EngineError, EngineUnavailable
from engine.statistics import NamespaceStats, Stats
from gateway.caching.namespaces import parts_of
from gateway.config import ANY_NAME, ServedModelSettings
from gateway.engines.replicas import RETRY_AFTER_S, Replicas, sum_stats
from gateway.engines.waiting_requests import WaitingBounds, WaitingRequests
from gateway.errors import Kind, Refusal
from gateway.prompt import Renderer

_MODEL_PART = 2
"""The model's place among the parts of a namespace."""
_FOLDERS = re.compile(r"(?<![^\s'\"])/(?:[^/\s]+/)*")
"""The folders of a path of this machine."""
ModelState = Literal["ready", "starting", "failed"]


class FailedModel(Struct, frozen=True):
    """A model with a fault that was found before it had a renderer."""

    settings: ServedModelSettings
    reason: str
    """For people."""
    has_disk: bool = False
    """An earlier engine may have left blocks there."""


def _failed_to_start(name: str, reason: str) -> str:
    """Return a sentence for clients, without the folders of this machine."""
    told = _FOLDERS.sub("", reason).rstrip(".")
    return f"The model `{name}` failed to start and is not served: {told}."


@dataclass(slots=True)
class ServedModel:
    """One model and what serves it."""

    name: str
    """What clients send, and what usage and prices name."""
    replicas: Replicas
    renderer: Renderer
    aliases: tuple[str, ...] = ()
    """Further names; `ANY_NAME`: every name that no model has."""
    has_disk: bool = False
    """Blocks of an earlier engine may lie on disk."""
    quota_scale: float = 1.0
    """Factor of tenants' floors, ceilings and promises in this model's pool."""
    tenants: frozenset[str] | None = None
    """Names of those that may use it; None: all."""
    waiting: WaitingRequests = field(
        default_factory=lambda: WaitingRequests(WaitingBounds(512, 1_000_000))
    )
    """Requests that its engine has not started."""
    suffix: str = ""
    """Tells its namespaces from those of another served model of the same digest."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which clients may address the model, its own first; no `ANY_NAME`."""
        own = (self.name, *self.aliases)
        return tuple(dict.fromkeys(name for name in own if name != ANY_NAME))

    def is_open_to(self, tenant: str) -> bool:
        """Return whether a tenant, by its name, may use the model."""
        return self.tenants is None or tenant in self.tenants

    def origin(self) -> tuple[str, str] | None:
        """Return the model as its namespaces name it, and the digest of its template; None without
        an engine."""
        info = self.replicas.info
        if info is None:
            return None
        return info.model_digest + self.suffix, self.renderer.card.template_digest

    def failure(self) -> str:
        """Return why none of its engines ever will serve; "" while one may."""
        return self.replicas.failure()

    def state(self) -> ModelState:
        """Return whether the model takes requests, will, or never will."""
        if self.replicas.ready():
            return "ready"
        return "failed" if self.failure() else "starting"

    def unavailable(self, *, is_alone: bool) -> EngineUnavailable | Refusal:
        """Return the error of a request while there is no engine. `is_alone`: it is the only model
        and need not be named. If the engine never will serve, no time to try again is given."""
        if reason := self.failure():
            return Refusal(Kind.BUSY, "model_failed", _failed_to_start(self.name, reason))
        if absence := self.replicas.absence("" if is_alone else self.name):
            return EngineUnavailable("engine_unavailable", absence, RETRY_AFTER_S)
        what = "The engine" if is_alone else f"The engine of the model `{self.name}`"
        return EngineUnavailable("not_ready", f"{what} is starting.", RETRY_AFTER_S)


class ServedModels:
    """The served models. Belongs to the event loop; of a model only `tenants` ever changes."""

    def __init__(self, models: Sequence[ServedModel], failed: Sequence[FailedModel] = ()) -> None:
        """`models`: the default one first. `failed`: those that were to be served too. Raises
        ValueError for a name that two of `models` have."""
        self._models, self._failed = tuple(models), tuple(failed)
        self.default = self._models[0]
        self.by_name: dict[str, ServedModel] = {}
        """Each model by its name and its aliases, `ANY_NAME` included."""
        self._by_key: dict[str, ServedModel] = {}
        digests: set[str] = set()
        for model in self._models:
            for name in dict.fromkeys((model.name, *model.aliases)):
                if name in self.by_name:
                    raise ValueError(f"two models have the name {name!r}; expected one")
                self.by_name[name] = model
            digest = model.renderer.card.digest
            model.suffix = f"@{model.name}" if digest in digests else ""
            digests.add(digest)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @property
    def are_several(self) -> bool:
        """Whether there is more than one model, so that reports tell them apart."""
        return len(self._models) + len(self._failed) > 1

    @property
    def names(self) -> tuple[str, ...]:
        """All names of all models, without `ANY_NAME`."""
        return tuple(name for model in self._models for name in model.names)

    def find(self, name: str, tenant: str) -> ServedModel | None:
        """Return the model that a tenant means by a name: the one that has it, else the one that
        takes any name; None if neither is open to the tenant. O(failed models). Raises
        Refusal for one that failed."""
        for known in (name, ANY_NAME):
            model = self.by_name.get(known)
            if model is not None and model.is_open_to(tenant):
                return model
            for failed in self._failed:
                of = failed.settings
                is_open = of.open_to is None or tenant in of.open_to
                if is_open and known in (of.name, *of.aliases):
                    message = _failed_to_start(of.name, failed.reason)
                    raise Refusal(Kind.BUSY, "model_failed", message)
        return None

    def open_to(self, tenant: str) -> list[ServedModel]:
        """Return the models that a tenant, by its name, may use, without those that failed."""
        return [one for one in self._models if one.is_open_to(tenant) and not one.failure()]

    def states(self) -> dict[str, ModelState]:
        """Return the state of each model that was to be served, by name."""
        states = {model.name: model.state() for model in self._models}
        for failed in self._failed:
            states[failed.settings.name] = "failed"
        return states

    def failures(self) -> dict[str, str]:
        """Return why models failed to start, by name."""
        reasons = {model.name: model.failure() for model in self._models}
        reasons |= {failed.settings.name: failed.reason for failed in self._failed}
        return {name: reason for name, reason in reasons.items() if reason}

    def of_namespace(self, namespace: Namespace) -> ServedModel | None:
        """Return the model of a namespace; None if its model is not served, or not yet known."""
        parts = parts_of(namespace)
        if not parts:
            return None
        for model in self._models:
            if (info := model.replicas.info) is not None:
                self._by_key[info.model_digest + model.suffix] = model
        return self._by_key.get(parts[_MODEL_PART])

    # -- over all engines -----------------------------------------------------------------------

    def is_alive(self, epoch: str) -> bool:
        """Return whether an engine of this epoch still holds what it cached."""
        return any(model.replicas.is_alive(epoch) for model in self._models)

    def epochs(self) -> set[str]:
        """Return the epochs of the engines that accept requests."""
        return set[str]().union(*(model.replicas.epochs() for model in self._models))

    def epoch_of(self, namespace: Namespace) -> str:
        """Return the epoch of the engine of a namespace; "" without one."""
        info = self.info_of(namespace)
        return "" if info is None else info.epoch

    def info_of(self, namespace: Namespace) -> EngineInfo | None:
        """Return the description of the engine of a namespace; None without one."""
        model = self._only_or_of(namespace)
        return None if model is None else model.replicas.info

    def keeps_states(self, namespace: Namespace) -> bool:
        """Return whether the model of a namespace resumes only where a state was kept."""
        model = self._only_or_of(namespace)
        return model is not None and model.renderer.card.config.delta is not None

    def losses_of(self, namespace: Namespace) -> dict[str, int]:
        """Return the blocks that a namespace has lost, by cause."""
        model = self._only_or_of(namespace)
        return {} if model is None else model.replicas.losses_of(namespace)

    def stats_of(self, namespace: Namespace) -> Stats:
        """Return the latest heartbeat of the engine of a namespace; zeros without one."""
        model = self._only_or_of(namespace)
        return Stats() if model is None else model.replicas.stats

    def namespaces(self) -> Iterator[NamespaceStats]:
        """Yield the statistics of the namespaces of all engines."""
        for model in self._models:
            yield from model.replicas.namespaces()

    def evictions_by_taker(self) -> Counter[tuple[Namespace, Namespace]]:
        """Return evicted blocks by (owner, taker), for pairs of different namespaces."""
        found: Counter[tuple[Namespace, Namespace]] = Counter()
        for model in self._models:
            found.update(model.replicas.evictions_by_taker())
        return found

    def take_moves(self) -> dict[Namespace, BlockMoves]:
        """Return the moves of blocks since the last call. Has one caller."""
        found: dict[Namespace, BlockMoves] = {}
        for model in self._models:
            found |= model.replicas.take_moves()
        return found

    def stats(self) -> Stats:
        """Return the sums of all engines' latest heartbeats, rates too: they run side by side."""
        return sum_stats([model.replicas.stats for model in self._models])

    def floor_blocks_max(self) -> int | None:
        """Return the most that floors together may ask for, so that they fit in every pool; None
        without an engine. Floors count by each model's `quota_scale`."""
        found = [
            int(info.floor_blocks_max / model.quota_scale)
            for model in self._models
            if (info := model.replicas.info) is not None
        ]
        return min(found, default=None)

    async def refresh(self) -> Stats:
        """Ask the engines for fresh statistics, all that are ready; return their sums.

        Raises EngineError if none answers.
        """
        ready = [one for model in self._models for one in model.replicas if one.ready()]
        if not ready:
            return await self.default.replicas.get_stats()
        asked = [one.running() for one in ready]
        found = await asyncio.gather(*(one.get_stats() for one in asked), return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        for error in errors:
            if len(errors) == len(asked) or not isinstance(error, EngineError):
                raise error
        return sum_stats([one for one in found if isinstance(one, Stats)])

    async def refresh_all(self) -> frozenset[str]:
        """Ask every engine for fresh statistics. Returns the names of the engines elsewhere that
        are away. Raises EngineUnavailable if one of this machine is: what it held is not known. One
        that failed to start holds nothing but on a disk."""
        failed = [one.settings.name for one in self._failed if one.has_disk]
        failed += [one.name for one in self._models if one.failure() and one.has_disk]
        if failed:
            message = f"The model `{failed[0]}` failed to start; its disk cannot be asked."
            raise EngineUnavailable("not_ready", message)
        asked = [model.replicas for model in self._models if not model.failure()]
        found = await asyncio.gather(*(replicas.refresh_all() for replicas in asked))
        return frozenset[str]().union(*found)

    async def erase(
        self, namespace: Namespace, lease_id: str | None = None
    ) -> tuple[Erased, frozenset[str]]:
        """Erase a namespace, or a lease in it. Returns what was erased, and the names of the
        engines elsewhere that did not answer. Nothing for a model that is not served: no engine can
        read its blocks. Raises EngineError if an engine of this machine does not answer."""
        model = self._only_or_of(namespace)
        if model is None:
            return Erased(0, 0), frozenset()
        return await model.replicas.erase(namespace, lease_id=lease_id)

    def restarts(self) -> int:
        """Return the restarts of all engines together."""
        return sum(model.replicas.restarts for model in self._models)

    def _only_or_of(self, namespace: Namespace) -> ServedModel | None:
        return self.of_namespace(namespace) if self.are_several else self.default
