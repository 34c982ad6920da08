"""The name reaches every registry, in whatever order things are imported; and fits run by it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.harness import workers
from tests.harness.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]

SMALL = """
import sys, threading, os, torch
NAMESPACE = "{namespace}"
{first}
{second}
from importlib import import_module
L = import_module(NAMESPACE)
from torch.utils.data import DataLoader, TensorDataset
assert not {other!r} in sys.modules, "the other namespace was imported"

class Small(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def trainer(strategy):
    return L.Trainer(use_distributed_sampler=False, strategy=strategy, accelerator="cpu", devices=1, max_steps=3, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False,
                     enable_model_summary=False)

dataset = TensorDataset(torch.randn(16, 2))
loader = DataLoader(dataset, batch_sampler=torch.utils.data.BatchSampler(
    torch.utils.data.DistributedSampler(dataset, 1, 0), 4, False))
import ft_lightning
open_files = []
for strategy in ("FT_DDP", ft_lightning.FTDDPStrategy(min_replicas=1, timeout_s=20)):
    t = trainer(strategy)
    assert type(t.strategy).__module__ == "{home}", type(t.strategy)
    assert isinstance(t.strategy, import_module(NAMESPACE + ".strategies").DDPStrategy)
    before = dict(os.environ)
    t.fit(Small(), loader)
    # An epoch ends with an agreement, which is a step of the manager, too.
    assert t.global_step == 3 <= t.strategy.manager.current_step()
    assert t.strategy.last_step_committed is True and t.strategy.num_participants == 1
    assert t.is_global_zero and t.world_size == 1
    assert dict(os.environ) == before, "environment changed"
    assert not any("FT" in type(c).__name__ or "_AtEpochStart" == type(c).__name__
                   for c in t.callbacks)
    assert not torch.distributed.is_initialized()
    assert type(loader.batch_sampler) is torch.utils.data.BatchSampler, "the sampler was not released"
    assert "_ft_skip" not in vars(loader.batch_sampler)
    assert t.strategy.model is t.lightning_module
    open_files.append(len(os.listdir("/proc/self/fd")))
assert open_files[0] == open_files[1], open_files
print("threads", sorted(x.name for x in threading.enumerate()))
print("done")
"""

IMPORT = "import {}"


@pytest.mark.parametrize(
    ("namespace", "home", "other", "ours_first"),
    [
        ("lightning.pytorch", "ft_lightning.pytorch", "pytorch_lightning", True),
        ("pytorch_lightning", "ft_lightning.pl", "lightning", False),
    ],
)
def test_by_name_and_by_object(namespace: str, home: str, other: str, ours_first: bool) -> None:
    imports = [IMPORT.format("ft_lightning"), IMPORT.format(namespace)]
    first, second = imports if ours_first else reversed(imports)
    script = SMALL.format(namespace=namespace, home=home, other=other, first=first, second=second)
    done = run("-c", script, cold=False, FT_JOB_ID=home)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "done" in done.stdout
    assert "threads ['MainThread']" in done.stdout


def run(
    *command: str, cwd: Path = ROOT, cold: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FT_", "TORCHFT_", "PL_"))}
    env = {**clean, "PYTHONPATH": str(ROOT), **env}
    if not cold:  # a fork of a process that has torch, but no Lightning
        return workers.run("torch", command, env=env, cwd=cwd)
    return subprocess.run(
        [sys.executable, *command],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_import_loads_nothing_and_changes_nothing() -> None:
    script = """
import os, sys
before, path = dict(os.environ), list(sys.meta_path)
import ft_lightning
heavy = [m for m in ("torch", "lightning", "pytorch_lightning", "zmq", "lighthouse") if m in sys.modules]
assert not heavy, heavy
assert dict(os.environ) == before
assert len(sys.meta_path) == len(path) + 1
ft_lightning.install()
assert len(sys.meta_path) == len(path) + 1, "installed twice"
"""
    done = run("-c", script)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- without an import

# What `import torch` does last, which a fork has behind it.
REGISTERED = """
import sys, torch
sys.path.insert(0, {installed!r})
torch._import_device_backends()
assert not any(m.startswith(("lightning.", "lightning_fabric", "pytorch_lightning")) for m in sys.modules)
import {trainer_module}, {fabric_module}
from importlib import import_module
for module, registry in (("{trainer_module}", "StrategyRegistry"),
                         ("{fabric_module}", "STRATEGY_REGISTRY")):
    known = getattr(import_module(module + ".strategies"), registry)
    assert "ft_ddp" in known.available_strategies()
assert not any(m.startswith(("ft_lightning.trainer", "ft_lightning.fabric.")) for m in sys.modules), "loaded before it was asked for"
from {trainer_module} import Trainer
strategy = Trainer(strategy="ft_ddp", accelerator="cpu", devices=1, logger=False).strategy
assert type(strategy).__module__ == "{trainer_home}", type(strategy)
from {fabric_module} import Fabric
strategy = Fabric(strategy="ft_ddp", accelerator="cpu", devices=1).strategy
assert type(strategy).__module__ == "{fabric_home}", type(strategy)
"""
NAMESPACES = [
    {
        "trainer_module": "lightning.pytorch",
        "trainer_home": "ft_lightning.pytorch",
        "fabric_module": "lightning.fabric",
        "fabric_home": "ft_lightning.fabric",
    },
    {
        "trainer_module": "pytorch_lightning",
        "trainer_home": "ft_lightning.pl",
        "fabric_module": "lightning_fabric",
        "fabric_home": "ft_lightning.fabric_lf",
    },
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder which Python takes for an installation: it holds this project's entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["torch.backends"]
    folder = tmp_path_factory.mktemp("installed") / f"{project['name']}-0.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n"
    )
    (folder / "entry_points.txt").write_text(
        "[torch.backends]\n" + "".join(f"{k} = {v}\n" for k, v in points.items())
    )
    return folder.parent


@pytest.mark.process
@pytest.mark.parametrize("names", NAMESPACES, ids=lambda names: names["trainer_module"])
def test_four_registries_know_the_name_without_an_import(
    installed: Path, names: dict[str, str]
) -> None:
    script = REGISTERED.format(installed=str(installed), **names)
    done = run("-c", script, cold=False)
    assert done.returncode == 0, done.stderr[-2000:]


TORCH = """
import sys, time, torch
hook = sys.modules.get("ft_core.launch.import_hook")  # others may wait for their modules, too
print("hook" if hook and any("lightning" in name for name in hook._waiting) else "none")
light = "lighthouse", "lighthouse.files", "lighthouse.waits"  # the standard library alone
heavy = "lightning", "pytorch_lightning", "zmq", "lighthouse"
print([m for m in sys.modules if m.startswith(heavy) and m not in light])
"""


@pytest.mark.process
@pytest.mark.parametrize("value", ["", "0"])
def test_autoload_is_cheap_and_can_be_switched_off(installed: Path, value: str) -> None:
    only = installed.with_name(f"only{value or 1}")
    shutil.copytree(installed, only)
    (points,) = only.glob("*/entry_points.txt")
    points.write_text("[torch.backends]\nft_lightning = ft_lightning_autoload:autoload\n")
    done = run("-c", TORCH, PYTHONPATH=f"{ROOT}:{only}", FT_LIGHTNING_AUTOLOAD=value)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:2] == ["none" if value == "0" else "hook", "[]"]


def test_autoload_of_a_broken_installation_does_not_break_torch(tmp_path: Path) -> None:
    """ft_core is gone: torch would end in RuntimeError if anything got out."""
    (tmp_path / "ft_core.py").write_text("raise ImportError('gone')\n")
    script = "import ft_lightning_autoload as a; a.autoload(); print('alive')"
    done = run("-c", script, PYTHONPATH=f"{tmp_path}:{ROOT}", cwd=tmp_path)
    assert done.stdout == "alive\n", done.stderr
    assert "is not registered" in done.stderr


# ---------------------------------------------------------------- python -m ft_lightning

MAIN = """
import sys
from lightning.pytorch import Trainer
import helper
assert "ft_ddp" in sys.modules["lightning.pytorch.strategies"].StrategyRegistry
from ft_lightning.shared.launcher import script_command
print(sys.argv[1:], __name__, script_command(2)[1:])
"""


@pytest.mark.process
@pytest.mark.parametrize("how", ["script", "module"])
def test_by_python_m(tmp_path: Path, how: str) -> None:
    """As python itself would run it, and children will be run in the same way."""
    (tmp_path / "program.py").write_text(MAIN)
    (tmp_path / "helper.py").write_text("")
    what = ["program.py"] if how == "script" else ["-m", "program"]
    done = run("-m", "ft_lightning", *what, "--lr", "1", cwd=tmp_path, cold=False)
    assert done.returncode == 0, done.stderr[-2000:]
    again = [str(tmp_path / "program.py")] if how == "script" else ["-m", "program"]
    command = ["-m", "ft_lightning", *again, "--lr", "1"]
    assert done.stdout.strip() == f"['--lr', '1'] __main__ {command}"


@pytest.mark.parametrize(
    ("words", "says"),
    [([], "usage: "), (["-x"], "usage: "), (["nothing.py"], "no file 'nothing.py'")],
)
def test_python_m_says_what_it_wants(words: list[str], says: str) -> None:
    done = run("-m", "ft_lightning", *words, cold=False)
    assert done.returncode == 2
    assert says in done.stderr
