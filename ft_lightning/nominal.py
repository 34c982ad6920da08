"""Ranks as both frameworks' strategies answer them: nominal, so that they stay when groups die."""

from __future__ import annotations

from typing import Any

import torch

from ft_lightning.scope import Scope


class NominalRanks:
    """Part of a strategy. `_scope` is set when the Trainer or the Fabric is made."""

    parallel_devices: Any
    _scope: Scope | None = None
    _leader = False

    @property
    def scope(self) -> Scope:
        """Who this process is. Known once the Trainer or the Fabric has been created."""
        assert self._scope is not None, "the strategy is not attached to a Trainer or a Fabric yet"
        return self._scope

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        device: torch.device = self.parallel_devices[self._scope.device if self._scope else 0]
        return device

    @property
    def global_rank(self) -> int:
        """The number of this replica group."""
        return self._scope.index if self._scope else 0

    @property
    def world_size(self) -> int:
        """The configured number of replica groups."""
        return self._scope.num_groups if self._scope else 1

    @property
    def node_rank(self) -> int:
        return 0
