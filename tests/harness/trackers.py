"""What stands in the stores of trackers: the steps of one metric, of the one run that there is."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

TRACKERS = ("tensorboard", "wandb", "mlflow")


def installed_trackers() -> list[str]:
    return [name for name in TRACKERS if importlib.util.find_spec(name) is not None]


def in_csv(folder: Path, metric: str) -> list[int]:
    """`folder` has the versions."""
    (path,) = folder.glob("*/metrics.csv")
    with path.open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row.get(metric)]


def in_tensorboard(folder: Path, metric: str) -> list[int]:
    """`folder` has the versions."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (version,) = folder.glob("*")
    found = EventAccumulator(str(version), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in found.Scalars(metric)]


def in_wandb(folder: Path, metric: str, step: str = "trainer/global_step") -> list[int]:
    """`folder` has the processes' files: of one run, and each row has a number of its own."""
    from ft_core.launch.trackers import rows_of

    paths = sorted(folder.glob("wandb/*-run-*/run-*.wandb"))
    assert len({path.name for path in paths}) == 1, paths
    rows = [row for path in paths for row in rows_of(path)]
    numbers = [row["_step"] for row in rows]
    assert numbers == sorted(set(numbers)), numbers
    return [row[step] for row in rows if metric in row]


def make_mlflow(database: Path, experiment: str) -> None:
    """Processes that each make the tables of a new database fail, also under plain DDP."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    if client.get_experiment_by_name(experiment) is None:
        client.create_experiment(experiment)


def in_mlflow(database: Path, experiment: str, metric: str) -> list[int]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    assert run.info.status == "FINISHED"
    return [found.step for found in client.get_metric_history(run.info.run_id, metric)]
