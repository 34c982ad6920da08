"""Which module may import which (docs: "Layout"); what importing does; what pure means."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.architecture.source import PACKAGES, REPO, Module, modules
from tests.harness.waiting import PATIENCE_S

# The rest of the standard library is free to all but the pure.
ALLOWED = {
    "lighthouse": {"lighthouse", "msgpack", "zmq", "click", "rich"},
    "ft_core": {
        "ft_core",
        "lighthouse",
        "torch",
        "numpy",
        "msgpack",
        "zmq",
        "xxhash",
        "click",
        "rich",
    },
    "ft_lightning": {"ft_lightning", "ft_core", "lighthouse", "lightning", "torch", "numpy"},
    "ft_accelerate": {"ft_accelerate", "ft_core", "lighthouse", "accelerate", "torch", "numpy"},
}
# Reached by subpackage only, or by both names of one distribution.
# Draws the timeline, if it is there.
ALLOWED["ft_core"] |= {"matplotlib"}
ALLOWED["ft_lightning"] |= {
    "pytorch_lightning",
    "lightning_fabric",
    "lightning_utilities",
    "fsspec",  # as Lightning itself, whose dependency it is
    "msgpack",
}
# Optional: only where a script has imported it.
ALLOWED["ft_accelerate"] |= {"rich", "transformers"}
# Optional: only where a script logs to them.
ALLOWED["ft_lightning"] |= {"tensorboard"}
ALLOWED["ft_core"] |= {"wandb"}
# Optional: only where a CUDA tensor is encoded.
ALLOWED["ft_core"] |= {"triton"}
ALLOWED["ft_accelerate"] |= {"mlflow", "wandb"}

ALWAYS = {"__future__", "__main__"}

# What no module outside needs to know about the lighthouse's inside.
LIGHTHOUSE_INSIDE = {
    "announce",
    "ballot",
    "forming",
    "journal",
    "members",
    "rules",
}

PURE = [
    "ft_core.replica.events",
    "ft_core.replica.status",
    "ft_core.replica.group_leader",
    "ft_core.heal.protocol",
    "ft_core.launch.restarts",
    "ft_core.heal.transfer_plan",
    "ft_core.replica.machine",
    "ft_lightning.shared.topology",
    "lighthouse.wire.codec",
    "lighthouse.config",
    "lighthouse.wire.messages",
    "lighthouse.machine.rules",
    "lighthouse.machine.job",
    "lighthouse.machine.jobs",
    "lighthouse.machine.ballot",
    "lighthouse.routes",
    "lighthouse.machine.announce",
    "lighthouse.machine.forming",
    "lighthouse.machine.members",
]
# Read the environment when asked to; pure modules take no more than its constants and types.
CONSTANTS_OF = {"ft_core.environment", "ft_lightning.shared.launch_env"}
IMPURE_IMPORTS = {
    "asyncio",
    "concurrent",
    "datetime",
    "io",
    "logging",
    "mmap",
    "multiprocessing",
    "os",
    "pathlib",
    "queue",
    "random",
    "secrets",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "torch",
    "urllib",
    "uuid",
    "warnings",
    "zmq",
}
IMPURE_CALLS = {"open", "print", "input", "breakpoint"}


def _top(module: str) -> str:
    return module.split(".")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_down(package: str) -> None:
    wrong = [
        f"{module.name}:{found.line} imports {found.module}"
        for module in modules(package)
        for found in module.imports()
        if _top(found.module) not in sys.stdlib_module_names | ALLOWED[package] | ALWAYS
    ]
    assert not wrong


def test_the_inside_of_the_lighthouse_is_its_own() -> None:
    wrong = [
        f"{module.name}:{found.line} imports {found.module}"
        for module in modules("ft_core", "ft_lightning", "ft_accelerate")
        for found in module.imports()
        if found.module.split(".")[:1] == ["lighthouse"]
        and LIGHTHOUSE_INSIDE.intersection(found.module.split(".")[1:3])
    ]
    assert not wrong


def test_the_core_does_not_name_the_integrations() -> None:
    wrong = [
        f"{module.name}:{node.lineno}"
        for module in modules("ft_core")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name | ast.Attribute)
        and (getattr(node, "id", "") or getattr(node, "attr", "")) in ("lightning", "accelerate")
    ]
    assert not wrong


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_touch_nothing(name: str) -> None:
    """Neither a clock nor a thread, socket, file, log, environment or chance; nor a module that does."""
    (module,) = [m for m in modules() if m.name == name]
    for found in module.imports():
        assert _top(found.module) not in IMPURE_IMPORTS, f"{found.module} at line {found.line}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in IMPURE_CALLS, f"{node.func.id}() at line {node.lineno}"


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_only_pure_ones(name: str) -> None:
    (module,) = [m for m in modules() if m.name == name]
    ours = {m.name: m for m in modules()}
    for found in module.imports():
        if _top(found.module) not in PACKAGES:
            continue
        target = found.module if found.module in ours else found.module.rpartition(".")[0]
        if target in CONSTANTS_OF or target in PACKAGES:
            continue  # a package itself imports nothing (see below)
        bad = [f for f in ours[target].imports() if _top(f.module) in IMPURE_IMPORTS]
        assert not bad, f"{target} at line {found.line} is not pure"


def test_a_module_that_claims_to_be_pure_is_held_to_it() -> None:
    claiming = {module.name for module in modules() if module.is_pure}
    held = set(PURE)
    for name in sorted(claiming - held):
        test_pure_modules_touch_nothing(name)
        test_pure_modules_import_only_pure_ones(name)


# ---------------------------------------------------------------- importing

WITHOUT_TORCH = [
    "lighthouse",
    "lighthouse.server",
    "lighthouse.client",
    "lighthouse.cli",
    "lighthouse.process_watch",
    "lighthouse.watcher",
    "lighthouse.web",
    "lighthouse.__main__",
]

LOOK = """
import importlib, logging, os, sys, threading
before = dict(os.environ)
importlib.import_module(sys.argv[1])
for heavy in ("torch", "numpy", "lightning", "accelerate"):
    assert heavy not in sys.modules, f"loads {heavy}"
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
assert dict(os.environ) == before, "changes the environment"
assert not logging.getLogger().handlers, "sets up logging"
"""


@pytest.mark.process
@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_lighthouse_never_loads_torch_and_starts_nothing(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, name],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_lighthouse_alone_is_light() -> None:
    """`import lighthouse` must not even load pyzmq: pure modules work where it is missing."""
    code = "import sys, lighthouse, lighthouse.machine.job, lighthouse.wire.messages; print('zmq' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout == "False\n", done.stderr


def _module_level(module: Module) -> list[ast.AST]:
    """Nodes that run when the module is imported: not the bodies of functions."""
    found: list[ast.AST] = []
    todo: list[ast.AST] = [module.tree]
    while todo:
        node = todo.pop()
        found.append(node)
        if isinstance(node, ast.If) and "__main__" in ast.dump(node.test):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            todo += [*node.decorator_list, *node.args.defaults]
            todo += [d for d in node.args.kw_defaults if d is not None]
        elif not isinstance(node, ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return found


AT_IMPORT = {
    "environ",
    "getenv",
    "putenv",
    "basicConfig",
    "Thread",
    "Popen",
    "dictConfig",
    "signal",
    "gethostname",
    "set_start_method",
    "register_at_fork",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_happens_at_import(package: str) -> None:
    """No environment read, thread, process, signal handler or logging set-up."""
    wrong = []
    for module in modules(package):
        for node in _module_level(module):
            name = getattr(node, "id", "") or getattr(node, "attr", "")
            call = isinstance(node, ast.Call)
            reads = isinstance(node, ast.Name | ast.Attribute) and name in ("environ", "getenv")
            called = getattr(node.func, "id", "") or getattr(node.func, "attr", "") if call else ""
            if reads or called in AT_IMPORT:
                wrong.append(f"{module.name}:{node.lineno} {called or name}")
    assert not sorted(wrong)
