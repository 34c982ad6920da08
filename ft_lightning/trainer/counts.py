"""How a fit is doing, in numbers: for the progress bar, loggers, and whoever asks
`trainer.strategy.counts`."""

from __future__ import annotations

from typing import Any

from ft_core.manager import Manager
from ft_core.telemetry import COMMIT, DISCARD, HEAL_DONE, SERVE, Event
from ft_lightning.trainer.batches import adopt, adopted, release


class Counts:
    """Counts the events of one manager: a sink for its telemetry.

    Attributes:
        groups: configured number of replica groups.
        participants: of the last committed step.
        commits, discards: steps of the manager that this process saw end so: those of optimizers,
            and agreements at the ends of epochs.
        heals: states that this process took from its peers.
        served: states that peers took from this process.
        step_s: seconds that the last committed step took.

    Thread: written in those of the events; reading a number needs no lock.
    """

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.participants = 0
        self.commits = self.discards = self.heals = self.served = 0
        self.step_s = 0.0

    def __call__(self, event: Event) -> None:
        if event.kind == COMMIT:
            self.commits += 1
            self.participants = event.data["participants"]
            self.step_s = event.data["seconds"]
        elif event.kind == DISCARD:
            self.discards += 1
        elif event.kind == HEAL_DONE:
            self.heals += 1
        elif event.kind == SERVE:
            self.served += 1

    def for_bar(self, step: int) -> dict[str, str]:
        """What a progress bar shows, `step` being the Trainer's; what did not happen is left out.

        Texts: Rich's bar writes numbers with the fraction that the user wants for metrics.
        """
        shown = {"groups": f"{self.participants}/{self.groups}", "step": str(step)}
        for name in ("discards", "heals"):
            if getattr(self, name):
                shown[name] = str(getattr(self, name))
        return shown

    def for_loggers(self) -> dict[str, float]:
        """What `FTMetricsCallback` logs."""
        return {
            "ft/participants": float(self.participants),
            "ft/commits": float(self.commits),
            "ft/discards": float(self.discards),
            "ft/heals": float(self.heals),
            "ft/served": float(self.served),
            "ft/step_s": self.step_s,
        }


def count(manager: Manager, groups: int) -> Counts:
    """Counts of what `manager` does from now on."""
    counts = Counts(groups)
    manager.telemetry.add_sink(counts)
    return counts


def show_in_bar(trainer: Any, counts: Counts, *, visible: bool) -> None:
    """Have the Trainer's progress bar (any with Lightning's `get_metrics`: TQDM's, Rich's, a
    user's) show the counts after its own items. `hide_from_bar` undoes it.

    `visible`: this process is the one that has a bar, which the user has not disabled. Lightning
    asks for rank zero when it sets up, when nobody is yet, and a bar that was made invisible cannot
    be shown later: so one bar stays with one replica group, whoever leads.
    """
    bar = trainer.progress_bar_callback
    if bar is None or adopted(bar) or not hasattr(bar, "get_metrics"):
        return
    if visible:
        bar.enable()

    def methods(cls: Any) -> dict[str, Any]:
        def get_metrics(self: Any, trainer: Any, module: Any) -> Any:
            items = dict(cls.get_metrics(self, trainer, module))
            ours = counts.for_bar(trainer.global_step)
            return {**items, **{name: value for name, value in ours.items() if name not in items}}

        return {"get_metrics": get_metrics}

    adopt(bar, methods)


def hide_from_bar(bar: Any) -> None:
    """Give a progress bar its own class back."""
    if bar is not None:
        release(bar)
