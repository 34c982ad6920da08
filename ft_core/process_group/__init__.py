"""Process groups whose members can change while they live."""

from __future__ import annotations

from ft_core.process_group.base import ProcessGroup
from ft_core.process_group.errors import ProcessGroupError
from ft_core.process_group.gloo import ProcessGroupGloo, native_reconfigure_available

__all__ = [
    "ProcessGroup",
    "ProcessGroupError",
    "ProcessGroupGloo",
    "native_reconfigure_available",
]
