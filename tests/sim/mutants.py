"""Take one rule out of the machines, and see which net notices: `python -m tests.sim.mutants [NAME ...]`.

`mutants.toml` lists the mutants, under the module that each changes: a name, a text that stands exactly
once in that module, and what replaces it. A mutant lives in a process of its own, where the module is
changed as it is imported, and the nets are tried in this order until one finds it:

scenarios    the texts in `tests/scenario`
seeds        the first seeds of `tests/sim/test_seeds.py`
groups       replica groups of several ranks (`groups.py`)
cuts         hosts that can't connect to each other (`test_sim_pairs.py`)
lighthouses  two lighthouses behind one address (`test_sim_lighthouses.py`)
more seeds   the rest of the seeds, also with many faults in a short time
tests        the machines' unit tests

A mutant that no net finds survives. The list says why (`survives`), or a net has a hole. Mutants with what
one net is to say of them (`says`, `by`) run in the suite (`test_sim_mutations.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import re
import signal
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
FIRST_SEEDS, ALL_SEEDS, DENSE_SEEDS = 100, 2_000, 400
OTHER_SEEDS = 40
RUN_S = 30.0
"""CPU time that one run (of some 20 ms) may take; a run that takes more does not end."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """`module` (dotted) with `old` replaced by `new`. `says`: a pattern for what the net `by` says of it,
    `first`: which of the simulator's seeds finds it, where that is late. `survives`: why no net finds it."""

    module: str
    name: str
    old: str
    new: str
    says: str = ""
    by: str = "seeds"
    first: int = 0
    survives: str = ""

    @property
    def path(self) -> Path:
        return ROOT.joinpath(*self.module.split(".")).with_suffix(".py")

    def source(self) -> str:
        """The module's text, changed; ValueError if `old` does not stand in it exactly once."""
        text = self.path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is {count} times in {self.path}")
        return text.replace(self.old, self.new)


def load() -> list[Mutant]:
    """All mutants of the list."""
    modules = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return [
        Mutant(module, name, **fields)
        for module, mutants in modules.items()
        for name, fields in mutants.items()
    ]


class Changed(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports the mutant's module from its changed text."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._code: CodeType = compile(mutant.source(), str(mutant.path), "exec")

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        return importlib.util.spec_from_file_location(name, self._mutant.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        return self._code

    def get_source(self, fullname: str) -> str:
        return self._mutant.source()


# ---------------------------------------------------------------- nets

Net = Iterator[str]
"""Runs, each with what it complains of (empty: of nothing)."""


def scenarios() -> Net:
    from tests.scenario.language import play

    for path in sorted((ROOT / "tests" / "scenario").glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        yield path.stem if play(text) != text else ""


def seeds(first: int, end: int, *, dense: bool = False, compare_steps: int = 1) -> Net:
    """`compare_steps`: the lighthouse compares states, and may find a wrong one before the checker does."""
    from dataclasses import replace

    from tests.sim.profile import dense_profile_of, profile_of
    from tests.sim.run import run

    for seed in range(first, end):
        profile = dense_profile_of(seed) if dense else profile_of(seed)
        run(seed, replace(profile, compare_steps=compare_steps))
        yield ""


def more_seeds() -> Net:
    yield from seeds(0, DENSE_SEEDS, dense=True)
    yield from seeds(FIRST_SEEDS, ALL_SEEDS)


def groups() -> Net:
    from tests.sim.groups import FAULTS, Groups

    for seed in range(OTHER_SEEDS):
        Groups(seed, size=2 + seed % 2).run()
        Groups(seed, kinds=(FAULTS, ("give up", "no"))[seed % 2], faults=40).run()
        yield ""


def cuts() -> Net:
    from tests.sim.test_sim_pairs import SEEDS, Cut

    for seed in range(SEEDS):
        yield Cut(seed).complaint()


def lighthouses() -> Net:
    from tests.sim.test_sim_lighthouses import two_lighthouses

    for seed in range(OTHER_SEEDS):
        two_lighthouses(seed)
        yield ""


def tests() -> Net:
    import pytest

    folders = [str(ROOT / "tests" / name) for name in ("ft_core/replica", "lighthouse/machine")]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        found = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *folders])
    yield "a test fails" if found else ""


NETS: dict[str, Callable[[], Net]] = {
    "scenarios": scenarios,
    "seeds": lambda: seeds(0, FIRST_SEEDS),
    "groups": groups,
    "cuts": cuts,
    "lighthouses": lighthouses,
    "more seeds": more_seeds,
    "tests": tests,
}


def quick(mutant: Mutant) -> dict[str, Callable[[], Net]]:
    """For a mutant of which it is known what one net says."""
    if mutant.by != "seeds":
        return {mutant.by: NETS[mutant.by]}
    return {"seeds": lambda: seeds(mutant.first, mutant.first + 400, compare_steps=0)}


class Endless(Exception):
    """A run does not end."""


def _does_not_end(signum: int, frame: FrameType | None) -> None:
    raise Endless(f"more than {RUN_S:g} s of CPU time")


def complaint(net: Callable[[], Net]) -> str:
    """What the first run that complains says; empty if none does."""
    signal.signal(signal.SIGPROF, _does_not_end)
    limit_s = RUN_S if net is not tests else 20 * RUN_S
    number, runs = 0, None
    try:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        runs = net()
        for number, text in enumerate(runs):  # noqa: B007
            if text:
                return text
            signal.setitimer(signal.ITIMER_PROF, limit_s)
    except Exception as error:  # a broken machine may fail in any way
        text = " ".join(str(error).split())[:200]
        return f"{number}: {type(error).__name__} {text}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return ""


def _live(mutant: Mutant | None, nets: dict[str, Callable[[], Net]], answer: Connection) -> None:
    if mutant is not None:
        sys.meta_path.insert(0, Changed(mutant))
    for name, net in nets.items():
        if text := complaint(net):
            answer.send((name, text))
            return
    answer.send(("", ""))


def found_by(mutant: Mutant | None, nets: dict[str, Callable[[], Net]] = NETS) -> tuple[str, str]:
    """(the net that finds it, what it says); empty: it survives. None: the machines as they are. This process
    must not have imported them yet: the mutant's process is its copy."""
    if mutant is not None:
        mutant.source()
        assert mutant.module not in sys.modules, "the unchanged module is in memory"
    mine, its = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_live, args=(mutant, nets, its))
    process.start()
    its.close()
    try:
        found: tuple[str, str] = mine.recv()
    except EOFError:
        found = ("seeds", "the process has died")
    process.join()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each mutant and the net that finds it; 0 if each that survives is listed with a reason."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="patterns; none: all mutants")
    parser.add_argument("--quick", action="store_true", help="those with `says`, in the suite")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    options = parser.parse_args(arguments)
    chosen = [
        m
        for m in load()
        if (not options.names or any(re.search(p, f"{m.module} {m.name}") for p in options.names))
        and (m.says or not options.quick)
    ]
    nets = {name: NETS[name] for name in options.nets}
    if any(found := found_by(None, {"scenarios": scenarios})):
        print(f"a net finds something without a mutant: {found}")
        return 1
    table: Counter[str] = Counter()
    wrong = 0
    for mutant in chosen:
        net, text = found_by(mutant, quick(mutant) if options.quick else nets)
        bad = (not re.search(mutant.says, text)) if options.quick else not (net or mutant.survives)
        wrong += bad
        table[net or "survivors"] += 1
        print(
            f"{'WRONG ' * bad}{mutant.module} {mutant.name}: {net or 'SURVIVES'}; {text}",
            flush=True,
        )
    print(f"{len(chosen)} mutants: " + ", ".join(f"{n} {name}" for name, n in table.most_common()))
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
