"""What a Fabric script saves and loads (`fabric.save`, `fabric.load`), and what is said of it.

The script itself decides what it loads. When all processes of a job have died, its supervisor starts
the script again. It goes on from the state that the supervisor's keeper holds, unless what it has loaded
is newer. A line says from where the job goes on. This machine remembers the newest file of each job for
that.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ft_core.environment import SHARED_JOB
from ft_core.launch.supervisor import say
from ft_lightning.fabric.fabric_step import FabricStepMixin
from ft_lightning.shared.strategy_base import NoLongerLeads
from ft_lightning.trainer.saves import HeldSaves, copied, write_whole
from lighthouse.files import machine_file, replace_whole

log = logging.getLogger("ft_lightning")


class FabricSavesMixin(FabricStepMixin):
    """The part of the strategy that saves and loads. The loop's thread."""

    _loaded = ""
    """The file that this process has loaded last."""

    def _prepare(self) -> None:
        super()._prepare()
        self._held = HeldSaves()

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Called by `fabric.save`, on all: the leader writes. If it dies before all know that it has
        written, the next leader writes. Raises what the storage raises."""
        while True:
            wrote = self._save(path, state, storage_options=storage_options, filter=filter)
            if not self._meets():
                if not wrote and self._follows():
                    kept = copied(self._convert_stateful_objects_in_state(state, filter or {}))
                    self._held.hold(partial(self._write, path, kept, storage_options))
                return
            wrote_here = torch.tensor([float(wrote)], device=self.root_device)
            written = self._round("save", wrote_here, "sum")
            if written is None or float(written) > 0:
                return

    def _save(self, path: Any, state: dict[str, Any], *, storage_options: Any, filter: Any) -> bool:
        """Save once; whether this process has written, or its group has."""
        checkpoint = self._convert_stateful_objects_in_state(state, filter or {})
        return self._write(path, checkpoint, storage_options)

    def _write(self, path: Any, checkpoint: dict[str, Any], storage_options: Any) -> bool:
        """Write if this process leads; whether it has written."""
        if not self._still_leads():
            return False
        io = self.checkpoint_io
        plain = isinstance(io, self._from("fabric.plugins.io").TorchCheckpointIO)
        try:
            write_whole(
                io, checkpoint, path, storage_options, plain=plain, still_leads=self._still_leads
            )
        except NoLongerLeads:
            return False
        self._remember(path)
        return True

    def _follows(self) -> bool:
        """Whether this process can save in the leader's place, when it leads: where they do not meet."""
        manager = self._manager
        trains = self._met and manager is not None and not manager.left()
        behind = self._window.local or self._lost
        return trains and not behind and self.scope.group_size == 1

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Called by `fabric.load`, on all."""
        self._loaded = str(path)
        remainder: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return remainder

    def _on_quorum(self) -> bool:
        known = super()._on_quorum()
        if known and self._group_leads:
            self._held.make_up()
        if known and not self._met:
            self._met = True
            goes_on = self._goes_on() if self.scope.restarts else ""
            for sentence in filter(None, (goes_on, self.progress.unknown) if self._leader else ()):
                say("ft_lightning", sentence)
        return known

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, **kwargs)
        if self._votes_each_step and self.last_step_committed:
            self._held.settled()
        return output

    def _goes_on(self) -> str:
        """This process was started again, and found none to heal from: from where the job goes on."""
        assert self._manager is not None
        if self._manager.state.kept is not None:
            return ""  # the narrator tells
        record, saved = self._record(), ""
        with contextlib.suppress(OSError):
            saved = "" if record is None else record.read_text()
        if not saved:
            return ""
        if self.progress.step:
            return (
                f"all had ended; the job goes on from {self._loaded or saved} (step "
                f"{self.progress.step:,})"
            )
        if self._loaded:
            return (
                f"all had ended; the job goes on from {self._loaded}, which has no progress: steps and "
                "batches are counted anew. Save fabric.strategy.progress with the model"
            )
        return (
            "all had ended, and the script has not called fabric.load, though the job has saved "
            f"{saved}: it begins anew. Load that before the first batch to go on from there"
        )

    def _takes_kept(self, parts: dict[str, Any]) -> bool:
        """Whether the loop can go on from a state that the supervisor's keeper holds, instead of from what
        the script has loaded."""
        state, mine = parts["default"], self.progress.step
        trained = self._loaded or any(optimizer.state for optimizer in self._optimizers)
        if state["progress"]["step"] < mine or (trained and not mine):
            return False
        why = self._lost_place(state)
        if why:
            log.warning("the kept state of the job is not used: %s", why)
        return not why

    def _lost_place(self, state: dict[str, Any]) -> str:
        raise NotImplementedError

    def _remember(self, path: Any) -> None:
        """This process has saved `path`."""
        record = self._record()
        if record is not None:
            with contextlib.suppress(OSError), replace_whole(record) as draft:
                draft.write_text(str(path))

    def _forget_saves(self) -> None:
        """The training is at its end."""
        record = self._record()
        if record is not None and self._leader:
            with contextlib.suppress(OSError):
                record.unlink(missing_ok=True)

    def _record(self) -> Path | None:
        """The file that holds the path of the job's newest checkpoint. None: its id may be another
        job's, too."""
        job = self._training
        if job is None or job.job_id == SHARED_JOB or job.job_id.startswith("alone-"):
            return None
        return machine_file("ft_lightning", f"{job.job_id} {job.room_id}", "saved")
