"""What the package does by being installed: the entry point that `import torch` calls.

torch calls every entry point of the group "torch.backends" at the end of its own import, and an
exception there makes `import torch` fail everywhere. So no exception leaves this module, nothing
heavy is imported, and with FT_ACCELERATE_AUTOLOAD=0 (or torch's TORCH_DEVICE_BACKEND_AUTOLOAD=0)
nothing is done at all. torch may be imported from the middle of `import accelerate`: names are
replaced when the modules that define them have been executed (`ft_core.launch.import_hook`).

No `.pth` file is needed: `accelerate launch` imports torch before it imports the modules that
read its YAML.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType

log = logging.getLogger("ft_accelerate")


def autoload() -> None:
    """Wait for Accelerate's modules. Never raises."""
    try:
        from ft_accelerate.options import may_autoload

        if not may_autoload():
            return
        from ft_accelerate.launch import launch_hooks

        launch_hooks.watch()
        _protect_this_process()
    except Exception:
        log.debug("ft_accelerate does nothing in this process", exc_info=True)


def _protect_this_process() -> None:
    """If the environment says that this is a training process, install when Accelerate is there.

    Failures must be loud here: an unprotected replica group would train alone.
    """
    from ft_accelerate.options import is_enabled

    try:
        if not is_enabled():
            return
    except ValueError as error:
        raise SystemExit(f"ft_accelerate: {error}") from None
    from ft_core.launch.import_hook import when_imported

    when_imported("accelerate", _install)


def _install(accelerate: ModuleType) -> None:
    """Called in the thread that imports Accelerate. Ends the process if it can't be protected."""
    under_way = _half_imported()
    if under_way:  # Accelerate is imported by one of our own modules, which `install` needs whole
        from ft_core.launch.import_hook import when_imported

        when_imported(under_way, lambda module: _install(accelerate))
        return
    try:
        from ft_accelerate.install import install

        install()
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"ft_accelerate: {error}") from None
    except Exception as error:
        raise SystemExit(f"ft_accelerate: cannot protect this process: {error!r}") from error


def _half_imported() -> str:
    """The first of our modules whose import has begun and not ended, "" if there is none."""
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if name.startswith("ft_accelerate.") and getattr(spec, "_initializing", False):
            return name
    return ""
