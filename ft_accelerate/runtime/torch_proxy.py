"""What Accelerate's modules see as `torch`: torch, with the world made of all replica groups.

Accelerate's functions look up the global name `torch` of their module when they run. Giving four of
its modules another value for that name changes `gather`, `reduce`, `broadcast`, ... for everybody,
also for those who have imported these functions before; torch itself stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed


class _Over:
    """`module` with some of its names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __repr__(self) -> str:
        return f"<{self._module.__name__}, as seen by ft_accelerate>"


def torch_view(**names: Any) -> Any:
    """torch with `names` in `torch.distributed` replaced."""
    return _Over(torch, distributed=_Over(torch.distributed, **names))


def ddp_view(ddp_class: Any, **names: Any) -> Any:
    """As `torch_view`, and with `torch.nn.parallel.DistributedDataParallel` replaced."""
    parallel = _Over(torch.nn.parallel, DistributedDataParallel=ddp_class)
    view = torch_view(**names)
    view.__dict__["nn"] = _Over(torch.nn, parallel=parallel)
    return view
