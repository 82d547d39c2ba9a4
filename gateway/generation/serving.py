"""What the requests of one gateway that run a model share: the services of this room.

`gateway.app` makes one; `generation`, `embedding` and the handlers in `gateway.api` take it.
"""

from __future__ import annotations

from aiohttp import web

from gateway.context import Context
from gateway.errors import Kind, Refusal
from gateway.generation.delivery import KEY_HEADER, AnswerDelivery, IdempotentDelivery, Replays
from gateway.generation.preparation import Preparation
from gateway.generation.rate_limits import RateLimits
from gateway.generation.stored_responses import StoredResponses
from tenancy.types import Identity


class Serving:
    """The services of one gateway. Belongs to its event loop."""

    def __init__(self, gateway: Context, limits: RateLimits) -> None:
        self.gateway = gateway
        self.limits = limits
        self.preparation = Preparation(gateway)
        self.stored = StoredResponses(
            gateway.config,
            gateway.store,
            gateway.contents,
            gateway.responses,
            gateway.preparations,
            gateway.wall,
            gateway.log,
        )
        self._replays = Replays(gateway.config.idempotency, gateway.contents, limits, gateway.wall)

    def check_open(self) -> None:
        """Refuse a request that comes while the server drains."""
        if self.gateway.running.is_draining:
            message = "The server is shutting down."
            raise Refusal(Kind.BUSY, "shutting_down", message, retry_after_s=5.0)

    async def delivery(
        self, request: web.BaseRequest, body: bytes, identity: Identity
    ) -> AnswerDelivery | web.StreamResponse:
        """Return how a request is answered; the response itself, if it was sent once more.

        Raises Refusal for an invalid idempotency key, and IdempotencyConflict.
        """
        if KEY_HEADER not in request.headers:
            return AnswerDelivery(request)
        found = await self._replays.find(request, body, identity)
        if isinstance(found, web.StreamResponse):
            return found
        return IdempotentDelivery(request, found, self.gateway.work)
