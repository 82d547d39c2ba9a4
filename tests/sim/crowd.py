"""A simulated life in which few payers have many namespaces, and all their terms change.

As `life`, and more: quotas change during requests, namespaces move from one payer to another as
shared scopes do, leases and prefixes are erased one by one, promises are bounded, priorities differ
more, and a request is cancelled in the very step in which it ends.
"""

from __future__ import annotations

from msgspec import structs

from engine.api import CacheGrant, Erase, LeaseRequest, Quota, Request
from tests.checkers import expect
from tests.sim.life import RETENTIONS, Life

NAMESPACES = tuple(bytes([97 + number]) for number in range(6))
PAYERS = (b"one", b"two", b"three")


class Crowd(Life):
    """One such life, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.world.promises = True  # floors change, so a request may fail for lack of memory
        self.terms = {payer: self._terms(payer) for payer in PAYERS}
        self.payers = {name: self.chance.choice(PAYERS) for name in NAMESPACES}
        self._earlier: set[str] = set()
        restart = self.world.restart

        def restarted() -> None:
            self._earlier = set(self.world.streams)
            restart()

        self.world.restart = restarted  # type: ignore[method-assign]

    def _terms(self, payer: bytes) -> Quota:
        chance = self.chance
        return Quota(
            floor_blocks=chance.choice([0, 0, 2, 5]),
            ceiling_blocks=chance.choice([None, None, 6, 10]),
            weight=chance.choice([0.5, 1.0, 4.0]),
            promised_blocks_max=chance.choice([None, None, 0, 3]),
            payer=payer,
        )

    def _happen(self) -> None:
        chance, world = self.chance, self.world
        roll = chance.random()
        if roll < 0.04:
            payer = chance.choice(PAYERS)
            self.terms[payer] = self._terms(payer)
            if chance.random() < 0.7:
                world.core.cache.set_quota(self.terms[payer])
        elif roll < 0.06:
            self.payers[chance.choice(NAMESPACES)] = chance.choice(PAYERS)
        elif roll < 0.09:
            name = chance.choice(NAMESPACES)
            lease_id = chance.choice(["l0", "l1", "none"])
            world.core.erase(Erase(1, name, lease_id=lease_id))
        elif roll < 0.11:
            world.core.erase(Erase(1, chance.choice(NAMESPACES), tokens=self._prompt()[:3]))
        elif roll < 0.13:
            world.erase(chance.choice(NAMESPACES))
        elif roll < 0.16:
            self._cancel_at_the_end()
        elif roll < 0.18:
            world.peek(chance.choice(NAMESPACES), self._prompt())
        else:
            super()._happen()
        world.check()

    def _cancel_at_the_end(self) -> None:
        """Cancel a request just before, or just after, the step that brings its last token."""
        world = self.world
        nearly = [
            name
            for name, stream in sorted(world.live.items())
            if stream.outputs[0] and len(stream.outputs[0]) >= stream.request.max_tokens - 1
        ]
        if nearly:
            name = self.chance.choice(nearly)
            if self.chance.random() < 0.5:
                world.step()
            world.end_sample(name, 0, self.chance.randrange(4))
            world.cancel(name)

    def _request(self) -> Request:
        chance = self.chance
        plain = super()._request()
        name = chance.choice(NAMESPACES)
        leases = tuple(
            LeaseRequest(
                chance.randrange(len(plain.tokens) + 1), chance.choice(RETENTIONS), f"l{n}"
            )
            for n in range(chance.choice([0, 1, 2]))
        )
        grant = CacheGrant(
            name,
            self.terms[self.payers[name]],
            leases,
            read=plain.grant.read,
            write=plain.grant.write,
        )
        return structs.replace(plain, grant=grant, priority=chance.choice([0, 0, 1, 5]))

    def count_outputs(self) -> None:
        """Check at rest that the sampled tokens minus the unneeded ones equal the charged
        tokens.
        """
        stats = self.world.core.stats()
        charged = sum(
            stream.finished.usage.output_tokens
            for name, stream in self.world.streams.items()
            if stream.finished is not None and name not in self._earlier
        )
        needed = stats.output_tokens_total - stats.unneeded_tokens_total
        expect(needed == charged, "output tokens that were needed", needed, charged)
