"""`ServedModels`: which model a name and a namespace belong to, and sums over the engines."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from engine.api import EngineInfo, Erased
from engine.client.client import EngineConnection
from engine.errors import EngineUnavailable, InvariantViolation
from engine.statistics import LevelStats, NamespaceStats, Stats
from gateway.caching.namespaces import namespace_of
from gateway.engines.replicas import Replicas
from gateway.engines.served_models import ServedModel, ServedModels
from gateway.levels.report import holds_promises
from gateway.prompt import Renderer
from tenancy.types import CachePolicy, Identity, Tenant
from tests.fakes import ENGINE_INFO
from tests.unit.gateway.levels.reported_levels import DISK


class SilentEngine(EngineConnection):
    """An engine that answers calls with its latest heartbeat, or with an error."""

    def __init__(self, info: EngineInfo | None, stats: Stats | None = None) -> None:
        super().__init__()
        self.info, self.stats = info, stats or Stats()
        self.error: Exception | None = None
        self.erased: list[bytes] = []

    def post(self, command: object) -> None:
        """Send nothing."""

    async def get_stats(self) -> Stats:
        """Return the heartbeat, or raise what a test has planted."""
        if self.error is not None:
            raise self.error
        return self.stats

    async def close(self) -> None:
        """Do nothing."""


def served(renderer: Renderer, engines: Iterable[SilentEngine]) -> ServedModels:
    """Return models named a, b, … over the same files."""
    return ServedModels(
        [
            ServedModel(name, Replicas.of(engine), renderer)
            for name, engine in zip("abcd", engines, strict=False)
        ]
    )


def namespace(model_key: str) -> bytes:
    """Return a tenant's namespace under a model."""
    return namespace_of(IDENTITY, model_key, "template", "")


IDENTITY = Identity(Tenant(1, "ada", "active", 0), "", 1, 1, CachePolicy())


def test_a_namespace_belongs_to_the_model_that_it_names(renderer: Renderer) -> None:
    """Equal files make equal digests; the later model's namespaces have its name beside it."""
    engines = [SilentEngine(ENGINE_INFO), SilentEngine(replace(ENGINE_INFO, epoch="f"))]
    models = served(renderer, engines)
    first, second = models
    spaces = [namespace(f"digest{model.suffix}") for model in models]

    assert (first.suffix, second.suffix) == ("", "@b")
    assert [models.of_namespace(space) for space in spaces] == [first, second]
    assert [models.epoch_of(space) for space in spaces] == ["e", "f"]
    assert models.of_namespace(namespace("another")) is None
    assert models.of_namespace(b"not made here") is None


def test_a_lost_engines_namespaces_stay_its_own(renderer: Renderer) -> None:
    """Its restart has the same digest; until then nothing is asked of another engine."""
    engines = [SilentEngine(ENGINE_INFO), SilentEngine(replace(ENGINE_INFO, model_digest="other"))]
    models = served(renderer, engines)
    space = namespace("other@b")
    before = models.of_namespace(space)
    engines[1].info = None

    assert before is models.of_namespace(space) is models.by_name["b"]
    assert (models.epoch_of(space), models.info_of(space)) == ("", None)


def test_a_name_belongs_to_one_model(renderer: Renderer) -> None:
    one = ServedModel("a", Replicas.of(SilentEngine(ENGINE_INFO)), renderer, ("x",))
    other = ServedModel("b", Replicas.of(SilentEngine(ENGINE_INFO)), renderer, ("a",))
    models = ServedModels([one])

    assert (models.names, models.by_name["x"]) == (("a", "x"), one)
    with pytest.raises(ValueError, match="two models have the name 'a'"):
        ServedModels([one, other])


def test_any_other_name_belongs_to_the_model_that_takes_all(renderer: Renderer) -> None:
    """A name that is served, but not to the tenant, is like any other to it."""
    one = ServedModel("a", Replicas.of(SilentEngine(ENGINE_INFO)), renderer, ("x",))
    other = ServedModel("b", Replicas.of(SilentEngine(ENGINE_INFO)), renderer, ("*", "y"))
    closed = ServedModel(
        "c", Replicas.of(SilentEngine(ENGINE_INFO)), renderer, tenants=frozenset({"bob"})
    )
    models = ServedModels([one, other, closed])
    found = [models.find(name, "ada") for name in ("a", "x", "b", "y", "c", "gpt-5.4-nano")]

    assert found == [one, one, other, other, other, other]
    assert models.find("c", "bob") is closed
    assert models.names == ("a", "x", "b", "y", "c")
    other.tenants = frozenset()
    assert models.find("gpt-5.4-nano", "ada") is None


def test_statistics_are_sums_over_the_engines(renderer: Renderer) -> None:
    each = [Stats(blocks=8, running=1, steps_per_s=2.5), Stats(blocks=4, running=2, call_id=9)]
    models = served(renderer, [SilentEngine(ENGINE_INFO, stats) for stats in each])
    found = models.stats()

    assert (found.blocks, found.running, found.steps_per_s, found.call_id) == (12, 3, 2.5, 0)
    assert served(renderer, [SilentEngine(ENGINE_INFO, each[0])]).stats() is each[0]


def test_a_heartbeat_is_that_of_the_namespaces_engine(renderer: Renderer) -> None:
    """Promises survive on the disk of their own model alone."""
    engines = [SilentEngine(ENGINE_INFO, Stats(levels=(DISK,))), SilentEngine(ENGINE_INFO)]
    models = served(renderer, engines)
    found = [models.stats_of(namespace(f"digest{model.suffix}")) for model in models]

    assert [holds_promises(stats) for stats in found] == [True, False]
    assert [
        holds_promises(Stats(levels=(LevelStats("host", "open", recovered_total=count),)))
        for count in (0, 1)
    ] == [False, True], "host memory does, if it was taken over"
    assert models.stats_of(namespace("another")) == Stats()


async def test_a_report_asks_the_engines_that_answer(renderer: Renderer) -> None:
    """One that is away costs the others nothing; a defect is no absence."""
    engines = [
        SilentEngine(ENGINE_INFO, Stats(blocks=1)),
        SilentEngine(ENGINE_INFO, Stats(blocks=2)),
    ]
    models = served(renderer, engines)
    both = await models.refresh()
    engines[0].error = EngineUnavailable("not_ready", "away")
    one = await models.refresh()
    engines[1].info = None

    assert (both.blocks, one.blocks) == (3, 2)
    with pytest.raises(EngineUnavailable):
        await models.refresh()
    with pytest.raises(EngineUnavailable):
        await models.refresh_all()
    engines[1].info = ENGINE_INFO
    engines[0].error = InvariantViolation("planted")
    with pytest.raises(InvariantViolation):
        await models.refresh_all()


async def test_an_erasure_asks_the_namespaces_engine(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [SilentEngine(ENGINE_INFO), SilentEngine(ENGINE_INFO)]
    models = served(renderer, engines)
    asked: list[tuple[object, bytes]] = []

    async def erase(self: SilentEngine, space: bytes, *, lease_id: str | None = None) -> Erased:
        asked.append((self, space))
        return Erased(0, 3)

    monkeypatch.setattr(SilentEngine, "erase", erase)
    space = namespace("digest@b")

    assert (await models.erase(space))[0].blocks == 3
    assert asked == [(engines[1], space)]
    assert (await models.erase(namespace("gone")))[0].blocks == 0, "no engine can read it"


def test_floors_fit_in_every_pool(renderer: Renderer) -> None:
    """A model with half the blocks takes half of each floor, so that twice as many fit."""
    small = SilentEngine(replace(ENGINE_INFO, floor_blocks_max=3))
    models = served(renderer, [SilentEngine(ENGINE_INFO), small])
    whole = models.floor_blocks_max()
    models.by_name["b"].quota_scale = 0.5

    assert (whole, models.floor_blocks_max()) == (3, 4)
    assert served(renderer, [SilentEngine(None)]).floor_blocks_max() is None


def test_namespaces_of_all_engines_are_listed(renderer: Renderer) -> None:
    engines = [SilentEngine(ENGINE_INFO), SilentEngine(ENGINE_INFO)]
    for number, engine in enumerate(engines):
        engine.namespaces.add([NamespaceStats(b"%d" % number, 1, 0, 0, 0)])

    found = served(renderer, engines).namespaces()

    assert [one.namespace for one in found] == [b"0", b"1"]
