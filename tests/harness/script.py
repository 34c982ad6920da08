"""What worker scripts share: the places at which they wait until the test lets them go on."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path


class Holds:
    """The places at which this process stops (option `holds` of a script).

    It appends the place to `<log>/<name>.holds`, then waits for the file `<log>/go.<place>`. The
    place "life:2" is the start of its second life.
    """

    def __init__(self, log: str | Path, name: str, places: Collection[str]) -> None:
        self.log, self.name, self.places = Path(log), name, frozenset(places)

    def begin_life(self) -> None:
        """Count this process as a life of its replica."""
        path = self.log / f"{self.name}.started"
        with path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        self.at(f"life:{len(path.read_text().split())}")

    def at(self, place: str) -> None:
        if place not in self.places:
            return
        with (self.log / f"{self.name}.holds").open("a") as file:
            file.write(f"{place}\n")
        while not (self.log / f"go.{place}").exists():
            time.sleep(0.02)  # other processes' files announce nothing
