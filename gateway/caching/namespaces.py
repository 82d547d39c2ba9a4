"""Engine namespaces and payers of tenants: how they are encoded, and how they are read back.

A namespace names a tenant (or the owner of a shared scope), a workspace, a model, a template and a
partition. The engine treats it as opaque bytes. It knows no HTTP and no engine state; admission
encodes, erasure and analytics decode.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from engine.api import (
    Namespace,
    NamespaceStats,
    Payer,
    Quota,
)
from tenancy.types import CachePolicy, Identity

SHARED = "scope:"
"""Begins the second part of a shared scope's namespace; no workspace's name has a colon."""


def namespace_of(
    identity: Identity, model_digest: str, template_digest: str, partition: str
) -> bytes:
    """The sharing scope of a request: whose, with which model and template, how narrowed.

    Each part stands behind its length, so that no two lists of parts give the same bytes.
    """
    scope = identity.scope
    if scope is None:
        whose = (str(identity.tenant.tenant_id), identity.workspace)
    else:
        whose = (str(scope.owner_id), f"{SHARED}{scope.scope_id}")
    return _joined(*whose, model_digest, template_digest, partition)


@lru_cache(maxsize=1_024)
def _joined(*parts: str) -> bytes:
    encoded = [part.encode(errors="surrogatepass") for part in parts]
    return b"".join(len(part).to_bytes(4, "big") + part for part in encoded)


def payer_of(identity: Identity) -> bytes:
    """Whose blocks and whose turn: all workspaces and partitions of a tenant have one quota, or a
    client could have a floor and a turn for each key that it makes up."""
    scope = identity.scope
    return str(identity.tenant.tenant_id if scope is None else scope.owner_id).encode()


def quota_of(policy: CachePolicy, payer: Payer) -> Quota:
    """What bounds a payer's blocks, in the engine's words."""
    return Quota(
        policy.floor_blocks,
        policy.ceiling_blocks,
        policy.weight,
        policy.promised_blocks_max,
        payer,
    )


_PARTS = 5


def parts_of(namespace: Namespace) -> tuple[str, ...]:
    """The parts that `admission.namespace_of` joined; () for what it did not make."""
    parts: list[str] = []
    at = 0
    while at + 4 <= len(namespace):
        end = at + 4 + int.from_bytes(namespace[at : at + 4], "big")
        if end > len(namespace):
            return ()
        parts.append(namespace[at + 4 : end].decode(errors="replace"))
        at = end
    return tuple(parts) if at == len(namespace) and len(parts) >= _PARTS else ()


def whose_is(namespace: Namespace) -> tuple[int, str] | None:
    """The tenant and the workspace that a namespace is held for; None for what is not ours. Reads
    no more than these: each namespace that has changed is asked it, twice a second."""
    end = 4 + int.from_bytes(namespace[:4], "big")
    start = end + 4
    rest = start + int.from_bytes(namespace[end:start], "big")
    tenant = namespace[4:end]
    if not tenant.isdigit() or rest >= len(namespace):
        return None
    return int(tenant), namespace[start:rest].decode(errors="replace")


def owner_of(namespace: Namespace) -> int | None:
    """The tenant alone."""
    whose = whose_is(namespace)
    return None if whose is None else whose[0]


def namespaces_of(
    namespaces: Iterable[NamespaceStats], tenant_id: int | None
) -> Iterable[NamespaceStats]:
    """Those that begin with a tenant's number; all where none is given."""
    if tenant_id is None:
        return namespaces
    number = str(tenant_id).encode()
    begins = len(number).to_bytes(4, "big") + number
    return (one for one in namespaces if one.namespace.startswith(begins))
