"""The options as one of Accelerate's kwargs handlers: `Accelerator(kwargs_handlers=[...])`."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.utils import KwargsHandler

from ft_accelerate.plugin.options import FaultTolerancePlugin


@dataclass
class FaultToleranceKwargs(FaultTolerancePlugin, KwargsHandler):
    """
    Use this object in your [`~accelerate.Accelerator`] to train fault-tolerantly. Its fields are
    those of [`~ft_accelerate.FaultTolerancePlugin`]; what is not passed comes from the environment.

    Creating one is what makes `Accelerator` know it.

    Example:

    ```python
    from accelerate import Accelerator
    from ft_accelerate import FaultToleranceKwargs

    accelerator = Accelerator(kwargs_handlers=[FaultToleranceKwargs(min_replicas=2)])
    ```
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        from ft_accelerate.runtime.install import install

        install()
