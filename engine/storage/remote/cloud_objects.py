"""Objects in the stores of clouds, and what speaks as S3 does: by obstore, an optional package.

Credentials, region and endpoint come from the environment, by the names that each cloud's own tools
use, such as `AWS_ACCESS_KEY_ID` and `AWS_ENDPOINT_URL`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import from_url

from engine.storage.remote.objects import ObjectMissing, RemoteFailed

PAGE = 1_000
TEXT_MAX = 200
_ADDRESS = re.compile(r"https?://[^\s,;]{0,2000}")


class _ObjectExists(RemoteFailed):
    """There is an object of this name already."""


class CloudObjects:
    """A bucket, or the part of it below a prefix: implements `RemoteStore`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Open a store by its address; asks it for nothing yet. Raises RemoteFailed."""
        wait = timedelta(seconds=timeout_s)
        with _failures():
            self._store = from_url(
                url,
                # What goes there is sealed, and requests are signed: plain HTTP is the operator's
                # choice, by the scheme of the endpoint.
                client_options={"timeout": wait, "connect_timeout": wait, "allow_http": True},
                retry_config={"max_retries": 1, "retry_timeout": wait},
            )

    def put(self, name: str, data: memoryview) -> None:
        """See `RemoteStore`."""
        with _failures():
            obstore.put(self._store, name, data, use_multipart=False)

    def put_new(self, name: str, data: memoryview) -> bool:
        """See `RemoteStore`."""
        try:
            with _failures():
                obstore.put(self._store, name, data, mode="create", use_multipart=False)
        except _ObjectExists:
            return False
        return True

    def get(self, name: str, bytes_max: int) -> memoryview:
        """See `RemoteStore`."""
        with _failures():
            return memoryview(obstore.get_range(self._store, name, start=0, length=bytes_max))

    def delete(self, names: Sequence[str]) -> None:
        """See `RemoteStore`."""
        try:
            with _failures():
                obstore.delete(self._store, list(names))
        except ObjectMissing:  # some clouds say so: each alone
            for name in names if len(names) > 1 else ():
                self.delete([name])

    def clear(self, prefix: str, limit: int) -> tuple[int, int]:
        """See `RemoteStore`."""
        found: list[str] = []
        size = 0
        with _failures():
            for page in obstore.list(self._store, prefix, chunk_size=min(limit, PAGE)):
                found += [one["path"] for one in page]
                size += sum(one["size"] for one in page)
                if len(found) >= limit:
                    break
        if found:
            self.delete(found)
        return len(found), size

    def names(self, prefix: str, limit: int) -> list[str]:
        """See `RemoteStore`."""
        found: list[str] = []
        with _failures():
            for page in obstore.list(self._store, prefix, chunk_size=min(limit, PAGE)):
                found += [one["path"] for one in page]
                if len(found) >= limit:
                    break
        return found[:limit]


@contextmanager
def _failures() -> Iterator[None]:
    """Turn the package's errors into `RemoteFailed`, by their kind and their first line without
    addresses."""
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissing("no such object") from error
    except (AlreadyExistsError, PreconditionError) as error:
        raise _ObjectExists("there is an object of this name") from error
    except (BaseError, OSError, ValueError) as error:
        first = _ADDRESS.sub("", str(error).split("\n", 1)[0])[:TEXT_MAX]
        raise RemoteFailed(f"{type(error).__name__}: {' '.join(first.split())}") from error
