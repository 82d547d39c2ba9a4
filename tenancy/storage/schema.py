"""The schema's versions: numbered files of SQL, and refusals of databases that they do not fit.

`sqlite` and `postgres` run the files that a database lacks, in one transaction, when they open it.
"""

from __future__ import annotations

from importlib import resources
from typing import Literal

from tenancy.errors import StoreError


def migrations(database: Literal["sqlite", "postgres"]) -> list[str]:
    """Return the migrations in order: number N leads to version N."""
    folder = resources.files("tenancy.storage").joinpath("migrations", database)
    files = sorted(folder.iterdir(), key=lambda item: item.name)
    for number, file in enumerate(files, 1):
        assert file.name.startswith(f"{number:04d}_"), f"{file.name} is out of order"
    return [file.read_text() for file in files]


def check_version(place: str, version: int, known: int) -> None:
    """Raise StoreError for a schema that is newer than the `known` ones."""
    if version > known:
        message = (
            f"{place} was written by a newer version: schema {version}; expected {known} or less."
        )
        raise StoreError("newer_schema", message)


def other_program(place: str) -> StoreError:
    """Return the error of a database that is not Trunkline's."""
    return StoreError("not_ours", f"{place} is the database of another program.")


def unreleased(place: str, version: int) -> StoreError:
    """Return the error of a database with a schema from before the first release."""
    message = (
        f"{place} was made before the first release (its schema {version} leads to no later one):"
        " open it with the version that made it, or move it away and start with a new one."
    )
    return StoreError("unreleased_schema", message)
