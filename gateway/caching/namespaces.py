"""Encode tenants as engine namespaces and payers, and decode namespaces.

A namespace identifies a tenant (or the owner of a shared scope), a workspace, a model, a template
and a partition. The engine treats it as opaque bytes. The module knows no HTTP and no engine state;
admission encodes, erasure and analytics decode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from msgspec import structs

from engine.api import AT_REST, AtRest, Namespace, Payer, Quota
from engine.statistics import NamespaceStats
from gateway.retention_classes import CachingConfig
from tenancy.types import FIDELITIES, CachePolicy, Fidelity, Identity

SHARED_SCOPE_PREFIX = "scope:"
"""Prefix of the second part of a shared scope's namespace; workspace names contain no colon."""


def namespace_of(
    identity: Identity,
    model_digest: str,
    template_digest: str,
    partition: str,
    fidelity: Fidelity = "exact",
) -> bytes:
    """Return the namespace of a request: its owner, model, template and partition.

    Requests that allow copies which are not exact have a namespace of their own, so that an exact
    request never meets what was computed over such a copy.

    Each part is prefixed with its length, so that different parts never give the same bytes.
    """
    scope = identity.scope
    if scope is None:
        whose = (str(identity.tenant.tenant_id), identity.workspace)
    else:
        whose = (str(scope.owner_id), f"{SHARED_SCOPE_PREFIX}{scope.scope_id}")
    parts = (*whose, model_digest, template_digest, partition)
    return _join_parts(*parts) if fidelity == "exact" else _join_parts(*parts, fidelity)


@lru_cache(maxsize=1_024)
def _join_parts(*parts: str) -> bytes:
    encoded = [part.encode(errors="surrogatepass") for part in parts]
    return b"".join(len(part).to_bytes(4, "big") + part for part in encoded)


def fidelity_of(identity: Identity, asked: Fidelity | None, kept: Fidelity) -> Fidelity:
    """Return the fidelity of a request's copies: what it asked for, or else its tenant's; that of
    the KV which its model's engine keeps (`kept`), if that is less."""
    return max(asked or identity.policy.fidelity, kept, key=FIDELITIES.index)


def rest_of(identity: Identity) -> AtRest:
    """Return where a request's KV may rest: both its tenant and the owner of its shared scope
    allow it."""
    return min(identity.policy.at_rest, identity.blocks_policy.at_rest, key=AT_REST.index)


def payer_of(identity: Identity) -> bytes:
    """Return the payer of a request's blocks: the tenant. All its workspaces and partitions share
    one quota; otherwise a client could get a floor and a turn for each key that it invents."""
    scope = identity.scope
    return str(identity.tenant.tenant_id if scope is None else scope.owner_id).encode()


def quota_of(
    policy: CachePolicy,
    payer: Payer,
    promised_blocks_default: int | None = None,
    scale: float = 1.0,
    on_device_default: int | None = None,
) -> Quota:
    """Return the engine's quota of a payer. `promised_blocks_default`: bounds a policy that sets no
    bound on promises; the payer's floor is its own and may be promised whole. `on_device_default`:
    the same for what these promises hold on the device while no level below keeps them. `scale`:
    factor of the policy's blocks in this engine's pool."""
    if scale != 1.0:
        policy = scaled(policy, scale)
    promised = policy.promised_blocks_max
    on_device = None
    if promised is None and on_device_default is not None:
        on_device = max(on_device_default, policy.floor_blocks)
    if promised is None and promised_blocks_default is not None:
        promised = max(promised_blocks_default, policy.floor_blocks)
    floor, ceiling = policy.floor_blocks, policy.ceiling_blocks
    return Quota(floor, ceiling, policy.weight, promised, payer, on_device)


def scaled(policy: CachePolicy, scale: float) -> CachePolicy:
    """Return a policy with its numbers of blocks multiplied by `scale`, floors rounded down and
    bounds up: a bound above 0 leaves room for a block."""
    ceiling, promised = policy.ceiling_blocks, policy.promised_blocks_max
    return structs.replace(
        policy,
        floor_blocks=int(policy.floor_blocks * scale),
        ceiling_blocks=None if ceiling is None else math.ceil(ceiling * scale),
        promised_blocks_max=None if promised is None else math.ceil(promised * scale),
    )


def promised_default(
    promisable: int,
    caching: CachingConfig,
    active_tenants: int,
    promised: tuple[int, int] = (0, 0),
) -> int | None:
    """Return how many blocks a tenant without a bound of its own may promise itself, of
    `promisable` ones: on the lowest level that keeps promises, or on the device above it, so that
    it takes no more of the pool if the disk is full or away, or must not have its prompts.

    None, up to the engine's own bound, for a tenant that is alone: it takes them from no other; and
    where nothing is promisable. `promised`: blocks that are promised there to the tenant and to
    all. Tenants without a bound promise themselves no more once all promises take
    `promised_together_default`: what is left is for tenants whose bound or floor the operator has
    set.
    """
    if active_tenants <= 1 or not promisable:
        return None
    own, every = promised
    share = int(promisable * caching.promised_share_default)
    left = int(promisable * caching.promised_together_default) - (every - own)
    return max(0, min(share, left))


_PARTS = 5


def parts_of(namespace: Namespace) -> tuple[str, ...]:
    """Return the parts that `namespace_of` joined; () for any other namespace.

    A sixth part is the fidelity of a namespace that is not exact.
    """
    parts: list[str] = []
    at = 0
    while at + 4 <= len(namespace):
        end = at + 4 + int.from_bytes(namespace[at : at + 4], "big")
        if end > len(namespace):
            return ()
        parts.append(namespace[at + 4 : end].decode(errors="replace"))
        at = end
    return tuple(parts) if at == len(namespace) and len(parts) >= _PARTS else ()


def fidelity_in(namespace: Namespace) -> Fidelity:
    """Return the fidelity of the copies of a namespace."""
    last = parts_of(namespace)[_PARTS:]
    return next((one for one in FIDELITIES if last == (one,)), "exact")


def tenant_and_workspace_of(namespace: Namespace) -> tuple[int, str] | None:
    """Return the tenant id and workspace of a namespace; None if it was not made here. Decodes only
    these parts, because it runs for each changed namespace, twice a second."""
    end = 4 + int.from_bytes(namespace[:4], "big")
    start = end + 4
    rest = start + int.from_bytes(namespace[end:start], "big")
    tenant = namespace[4:end]
    if not tenant.isdigit() or rest >= len(namespace):
        return None
    return int(tenant), namespace[start:rest].decode(errors="replace")


def owner_of(namespace: Namespace) -> int | None:
    """Return the tenant id of a namespace, or None."""
    whose = tenant_and_workspace_of(namespace)
    return None if whose is None else whose[0]


def namespaces_of(
    namespaces: Iterable[NamespaceStats], tenant_id: int | None
) -> Iterable[NamespaceStats]:
    """Return a tenant's namespaces; all if no tenant is given."""
    if tenant_id is None:
        return namespaces
    number = str(tenant_id).encode()
    begins = len(number).to_bytes(4, "big") + number
    return (one for one in namespaces if one.namespace.startswith(begins))
