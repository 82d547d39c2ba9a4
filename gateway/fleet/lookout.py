"""A process that prints each second what keepers of a Ray cluster say; `follow_cluster` reads it.

Run as `python -m gateway.fleet.lookout ADDRESS`. It is apart from its reader since Ray ends a
process that has been without its cluster's head for a minute.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from gateway.fleet.errors import FleetError
from gateway.fleet.ray_keeper import RayCluster
from gateway.fleet.replica_file import Sighting

LOOK_EVERY_S: Final = 1.0


def main(address: str) -> int:
    """Print sightings until nobody reads them; return the exit status."""
    output = os.dup(1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # Ray writes to it, too
    try:
        cluster = RayCluster(address)
        while True:
            keepers = cluster.reports(cluster.names())
            _print(output, Sighting(tuple(keepers)))
            time.sleep(LOOK_EVERY_S)
    except FleetError as error:
        _print(output, Sighting(problem=str(error)))
        return 1
    except BrokenPipeError:
        return 0


def _print(output: int, sighting: Sighting) -> None:
    os.write(output, msgspec.json.encode(sighting) + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
