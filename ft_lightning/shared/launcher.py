"""Lightning's side of `devices=N`: the replica groups of this machine under one supervisor.

Each process of a replica group runs the user's script from its first line, as under `torchrun`.
Code that follows `fit` runs in each of them. The supervisor does not run it: it ends with the last
of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from ft_core.config import JobOptions
from ft_core.environment import new_job_id
from ft_core.launch.ending import end_at_once, end_with_a_line
from ft_core.launch.rank_group import group_command
from ft_core.launch.supervisor import die_with, supervise, tell_lighthouse
from ft_core.launch.warm.starter import warm_starts
from ft_lightning.shared import registration
from ft_lightning.shared.launch_env import child_environment, interpreter_options, renew_rank
from ft_lightning.shared.topology import Scope
from lighthouse.files import hold_standard_streams

through_main = False
"""Whether this process was started by `python -m ft_lightning`: then children are, too."""


class SupervisorLauncher:
    """What Lightning calls instead of the user's run; it has the interface of its `_Launcher`.

    If `job` names no lighthouse, this process runs one for as long as it lives. `max_restarts`: see
    `RestartPolicy`. `warm_start`: fork a replica group that is started again from a template.
    `keep_state_s`, `keep_state_dir`: see `supervise`. `refuse(trainer)` raises ValueError for a Trainer that
    can't work here.
    """

    is_interactive_compatible = True
    """So `launch` says why there is nothing to start in a notebook."""

    def __init__(
        self,
        scope: Scope,
        job: JobOptions,
        max_restarts: int | None,
        *,
        warm_start: bool = True,
        keep_state_s: float = 0.0,
        keep_state_dir: str = "",
        refuse: Callable[[Any], None] = lambda trainer: None,
    ) -> None:
        self._scope, self._job, self._max_restarts = scope, job, max_restarts
        self._warm_start = warm_start
        self._keep_state_s, self._keep_state_dir = keep_state_s, keep_state_dir
        self._refuse = refuse

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Run the script's replica groups to their end, then end this process. Never returns.

        Raises RuntimeError if there is no script to run, and what `refuse(trainer)` does.
        """
        if trainer is not None:
            self._refuse(trainer)
        hold_standard_streams()
        scope = self._scope
        elsewhere = scope.num_groups - scope.supervised
        job_id = scope.job_id if elsewhere else new_job_id()
        script = script_command(scope.supervised * scope.group_size)
        keep_state_dir = self._keep_state_dir and os.path.abspath(self._keep_state_dir)
        if registration.started_in:
            os.chdir(registration.started_in)  # the script may have gone elsewhere, and will again
        command = group_command(script, scope.group_size)
        with contextlib.ExitStack() as for_as_long:
            address = self._job.lighthouse
            if not address:
                server = self._serve()
                for_as_long.callback(server.shutdown)
                address = server.address()
            ends = ""
            if not elsewhere:
                ends = tempfile.mkdtemp(prefix="ft_lightning_")
                for_as_long.callback(shutil.rmtree, ends, ignore_errors=True)

            def environment(number: int) -> dict[str, str]:
                place = child_environment(
                    scope.index + number,
                    scope.num_groups,
                    device=number * scope.group_size,
                    lighthouse=address,
                    job_id=job_id,
                    ends=ends,
                    processes=scope.supervised * scope.group_size,
                )
                return place | interpreter_options()

            code = supervise(
                command,
                environment,
                count=scope.supervised,
                first=scope.index,
                elsewhere=elsewhere > 0,
                min_alive=max(1, self._job.min_replicas - elsewhere),
                max_restarts=self._max_restarts,
                speaker="ft_lightning",
                on_given_up=tell_lighthouse(address, job_id),
                warm=warm_starts(self._warm_start, renew=[f"{renew_rank.__module__}:renew_rank"]),
                keep_state_s=self._keep_state_s,
                keep_state_dir=keep_state_dir,
            )
        # SystemExit would run the Trainer's exception hooks, which may save what was not trained.
        logging.shutdown()
        end_at_once("ft_lightning", "", code)

    def kill(self, signum: int) -> None:
        """Called by Lightning on a signal. The supervisor passes signals on itself."""

    def _serve(self) -> Any:
        from lighthouse.config import LighthouseConfig, Timeouts
        from lighthouse.standby import LaunchedLighthouse

        timeout_s, silent_s = self._job.timeout_s, self._job.timeouts.heartbeat_timeout_s
        return LaunchedLighthouse(
            config=LighthouseConfig(
                min_replicas=self._job.min_replicas,
                expected_replicas=self._scope.num_groups,
                # All start now; how long that takes has nothing to do with communication.
                timeouts=Timeouts.derive(
                    timeout_s,
                    join_timeout_s=max(timeout_s, 60.0),
                    heartbeat_timeout_s=silent_s,
                ),
            )
        )


def script_command(processes: int) -> list[str]:
    """The command that runs this script again, with its arguments, in the folder in which it was started.
    Raises RuntimeError if there is no script."""
    import __main__

    given, now = registration.started_with, sys.argv or [""]
    if given[:1] not in ([now[0]], ["-m"]):
        given = now  # what runs the script has given it arguments since
    arguments = [*given[1:], *_of_hydra()]
    path = now[0] and os.path.abspath(os.path.join(registration.started_in, now[0]))
    spec = getattr(__main__, "__spec__", None)
    if spec is not None and os.path.exists(path) and _is_of_runner(spec, path):
        spec = None
    program = spec.name.partition(".")[0] if spec is not None else os.path.basename(path)
    test_runner = program in ("pytest", "py.test", "unittest")
    runnable = hasattr(__main__, "__file__") and (spec is not None or os.path.exists(path))
    if test_runner or not runnable:
        run = "a process that runs" if processes == 1 else f"{processes} processes that run"
        raise RuntimeError(
            f"devices={processes} starts {run} your script again, and "
            "there is none to run (a notebook, a test runner or `python -c`): put the training "
            "into a script, or start the processes yourself with REPLICA_GROUP_ID, "
            "NUM_REPLICA_GROUPS and TORCHFT_LIGHTHOUSE set"
        )
    python = [sys.executable, *(["-m", "ft_lightning"] if through_main else [])]
    if spec is None:
        return [*python, path, *arguments]
    name = spec.name.removesuffix(".__main__")
    assert importlib.util.find_spec(name) is not None
    return [*python, "-m", name, *arguments]


def _is_of_runner(spec: Any, path: str) -> bool:
    """Whether what Python has started runs the script itself: `-m cProfile`, or it is a folder or a zip file."""
    return spec.name == "__main__" or os.path.realpath(spec.origin or "") != os.path.realpath(path)


def _of_hydra() -> list[str]:
    """In a Hydra application: further arguments, so that all processes have this one's run directory.

    Raises RuntimeError for a sweep: this process would end with its first job.
    """
    known = sys.modules.get("hydra.core.hydra_config")
    if known is None or not known.HydraConfig.initialized():
        return []
    config = known.HydraConfig.get()
    if config.mode is not None and config.mode.name == "MULTIRUN":
        raise RuntimeError(
            "Hydra's sweep (-m, --multirun) runs all of its jobs in one process, and devices=N ends the "
            "process with the first of them: start a command for each job (as by a loop of your "
            "shell, or Hydra's launchers for joblib, submitit or ray), or use devices=1"
        )
    return [f'hydra.run.dir="{config.runtime.output_dir}"', "hydra.output_subdir=null"]


def live_with_group(scope: Scope) -> None:
    """Let a process that trains end with its supervisor, if it has one, and with its group.

    If another rank of its group ends, the training is over when it comes back, no lighthouse answers, or the
    group is refused for good, this one ends with a line and an exit code instead of a traceback. The launcher
    restarts a group that lost a rank as a whole.
    """
    if scope.supervisor_pid:
        die_with(scope.supervisor_pid)
        for name in _RANK_ZERO_LOGGERS:
            logging.getLogger(name).addFilter(_said_by_the_supervisor)
    end_with_a_line("ft_lightning", scope.name)


_RANK_ZERO_LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "pytorch_lightning.utilities.rank_zero",
    "lightning.fabric.utilities.rank_zero",
    "lightning_fabric.utilities.rank_zero",
)
_BANNERS = ("GPU available:", "TPU available:", "\N{ELECTRIC LIGHT BULB} Tip:")


def _said_by_the_supervisor(record: logging.LogRecord) -> bool:
    """A filter: what Lightning prints when a Trainer is made, which the supervisor has made, too."""
    return not record.getMessage().startswith(_BANNERS)
