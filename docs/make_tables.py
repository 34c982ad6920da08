"""python docs/make_tables.py [--check]

Writes the tables of docs/protocol.md and docs/timeouts.md out of the code: the messages from their
dataclasses, the timeouts from `Timeouts.derive`, and the replica's transitions as they occur when
the simulator runs. `--check` changes nothing and exits with 1 if a table is stale.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ft_core.replica.machine import Replica  # noqa: E402
from ft_core.replica.status import Attempt, Stage  # noqa: E402
from lighthouse.config import Timeouts  # noqa: E402
from lighthouse.wire import messages  # noqa: E402

SEEDS = range(150)


def first_sentence(text: str | None) -> str:
    return re.split(r"(?<=[.;])\s", " ".join((text or "").split()))[0].rstrip(";.")


def message_table() -> str:
    """Every message with its direction, meaning and fields."""
    lines = ["| message | sent by | what it says | fields |", "|---|---|---|---|"]
    others = {
        messages.DeathNotice: "watcher",
        messages.DeclareDead: "tool",
        messages.StatusRequest: "tool",
    }
    for default, union in (("replica group", messages.Request), ("lighthouse", messages.Reply)):
        for kind in get_args(union):
            sender = others.get(kind, default)
            fields = ", ".join(f.name for f in dataclasses.fields(kind))
            lines.append(
                f"| `{kind.__name__}` | {sender} | {first_sentence(kind.__doc__)} | {fields} |"
            )
    return "\n".join(lines)


def transitions() -> str:
    """(state, event) -> states, as seen in simulated runs with faults."""
    from tests.sim.run import run

    seen: dict[tuple[str, str], set[str]] = defaultdict(set)

    def state(replica: Replica) -> str:
        return f"{replica.stage.value} / {replica.attempt.value}"

    original = Replica.handle

    def handle(self: Replica, message: Any, now: float) -> Any:
        before, event = state(self), type(message).__name__
        if event == "Decision":
            event += " (commit)" if message.committed else " (discard)"
        effects = original(self, message, now)
        after = state(self)
        if after != before:
            seen[(before, event)].add(after)
        return effects

    Replica.handle = handle  # type: ignore[method-assign]
    try:
        for seed in SEEDS:
            run(seed)
    finally:
        Replica.handle = original  # type: ignore[method-assign]
    order = {
        f"{s.value} / {a.value}": (i, j) for i, s in enumerate(Stage) for j, a in enumerate(Attempt)
    }
    lines = ["| from (with the lighthouse / in the step) | event | to |", "|---|---|---|"]
    for before, event in sorted(seen, key=lambda key: (order[key[0]], key[1])):
        after = ", ".join(sorted(seen[(before, event)], key=order.__getitem__))
        lines.append(f"| {before} | {event} | {after} |")
    return "\n".join(lines)


def timeout_table() -> str:
    """What each timeout is for some values of `timeout`, in seconds."""
    knobs = (5.0, 60.0, 600.0)
    derived = {knob: Timeouts.derive(knob) for knob in knobs}
    heads = " | ".join(f"timeout {knob:g} s" for knob in knobs)
    lines = [f"| name | {heads} |", "|---" * (len(knobs) + 1) + "|"]
    for field in dataclasses.fields(Timeouts):
        values = " | ".join(f"{getattr(derived[knob], field.name):g}" for knob in knobs)
        lines.append(f"| `{field.name}` | {values} |")
    return "\n".join(lines)


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "protocol.md": {"messages": message_table, "transitions": transitions},
    "timeouts.md": {"timeouts": timeout_table},
}


def renew(text: str, name: str, table: str) -> str:
    """`text` with what stands between the markers of `name` replaced."""
    pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the markers of table {name!r} are missing")
    return pattern.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text)


def main() -> int:
    stale = []
    for file, tables in TABLES.items():
        path = ROOT / "docs" / file
        text = path.read_text()
        fresh = text
        for name, make in tables.items():
            fresh = renew(fresh, name, make())
        if fresh != text:
            stale.append(file)
            if "--check" not in sys.argv:
                path.write_text(fresh)
    print(f"renewed {', '.join(stale)}" if stale else "all tables are fresh")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
