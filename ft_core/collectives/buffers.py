"""Buffers of a model that are kept equal in all members of a quorum, step by step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.futures import Future

from ft_core.step import GradientManager, while_it_lives

_ALIGNMENT_BYTES = 16  # every dtype's elements may start at such an offset


class _Flat:
    """One block of bytes with a view per buffer. Views have the buffers' dtypes and shapes."""

    def __init__(self, buffers: list[Tensor]) -> None:
        offsets, end = [], 0
        for buffer in buffers:
            offsets.append(end)
            size = buffer.numel() * buffer.element_size()
            end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.bytes = torch.zeros(end, dtype=torch.uint8, device=buffers[0].device)
        self.views = [
            self.bytes[at : at + b.numel() * b.element_size()].view(b.dtype).view(b.shape)
            for at, b in zip(offsets, buffers, strict=True)
        ]


class SharedBuffers:
    """The persistent buffers of `module` (running statistics), kept equal in all members of `manager`'s quorum.

    Each member's forward changes its own buffers from its own data. For equal (step, lineage) to mean equal state,
    buffers take part in the step like parameters do: the first participant's values are sent to all with the last
    gradients, take effect when the step is committed, and when it is discarded all members go back to where the
    step began. Bytes travel under a sum to which only the first participant adds anything but zeros: exact for
    every dtype, and one collective for all.

    Buffers that are not persistent are not in a state dict; they are left alone, and so are names in `ignored`.
    The buffers heal as the part `key` of the manager's state. Raises ValueError if they are on several devices;
    and in `begin`, or when the step ends, if one has changed its shape.

    Thread: `begin` and the manager's calls in the loop's, `send` in autograd's.
    """

    def __init__(
        self,
        manager: GradientManager,
        module: nn.Module,
        *,
        key: str,
        ignored: set[str] | None = None,
    ) -> None:
        self._manager = manager
        self._owners = list(owned_buffers(module, ignored or ()).values())
        self._began = self._sent = False
        self._in_flight: Future[Tensor] | None = None
        self.before_send: Callable[[], bool] | None = None
        """Called by `send`, also where an error keeps it from sending. False: do not send."""
        if not self._owners:
            return
        buffers = self.tensors()
        devices = {b.device for b in buffers}
        if len(devices) > 1:
            raise ValueError(
                f"buffers are on several devices ({', '.join(map(str, devices))}): put them on "
                "one, or pass forward_sync_buffers=False"
            )
        self._start, self._wire = _Flat(buffers), _Flat(buffers)
        manager.register_state_dict_fn(key, *while_it_lives(self._load, self._save))
        manager.register_step_end(self._on_step_end)

    def __bool__(self) -> bool:
        return bool(self._owners)

    @property
    def wire(self) -> Tensor:
        """What is sent: all buffers, as one tensor of bytes."""
        return self._wire.bytes

    def begin(self) -> None:
        """A forward is about to change the buffers: remember where this step began."""
        if self._owners and not self._began:
            self._began = True
            _copy(self._start.views, self._checked())

    def send(self) -> None:
        """Start the exchange, after the step's last gradients and in the same order everywhere."""
        if not self._owners or (self.before_send is not None and not self.before_send()):
            return
        if self._manager.errored() is not None:
            return
        if self._in_flight is not None:
            self._in_flight.wait()  # of an earlier backward pass of this step; done by now
        if self._manager.participating_rank() == 0:
            _copy(self._wire.views, self.tensors())
        else:
            self._wire.bytes.zero_()
        self._sent = True
        self._in_flight = self._manager.allreduce(self._wire.bytes, reduce_op=ReduceOp.SUM)

    def _on_step_end(self, committed: bool) -> None:
        if committed and self._sent:
            _copy(self._checked(), self._wire.views)
        elif not committed and self._began:
            _copy(self._checked(), self._start.views)
        self._began = self._began and not committed  # another attempt begins at the same values
        self._sent = False
        self._in_flight = None

    def _save(self) -> dict[str, Any]:
        return {"buffers": [b.detach() for b in self.tensors()]}

    def _load(self, state: dict[str, Any]) -> None:
        """Healed: these are the values with which the step began, also if it began on others."""
        _copy(self.tensors(), state["buffers"])
        self._began = True
        _copy(self._start.views, self.tensors())

    def tensors(self) -> list[Tensor]:
        """The buffers themselves; of expanded ones what they hold."""
        return [own_memory(getattr(owner, name)) for owner, name in self._owners]

    def _checked(self) -> list[Tensor]:
        """The same; each has the shape with which it was wrapped: a copy of another would broadcast, or raise."""
        tensors = self.tensors()
        for (owner, name), start, now in zip(self._owners, self._start.views, tensors, strict=True):
            if start.shape != now.shape:
                raise ValueError(
                    f"buffer {name!r} of {type(owner).__name__} had shape {tuple(start.shape)} when the "
                    f"model was wrapped, and has {tuple(now.shape)} now: a buffer that a state dict holds "
                    "is sent to all members, and a process that comes back loads it, so it must keep its "
                    "shape. Allocate the largest one that it may have, or register it with persistent=False"
                )
        return tensors


def owned_buffers(
    module: nn.Module, ignored: Collection[str] = ()
) -> dict[str, tuple[nn.Module, str]]:
    """Full name -> (owner, attribute) of each buffer that a state dict holds, in order; shared ones once. The tensors
    may be replaced. Without those whose names are `ignored`."""
    owned: dict[str, tuple[nn.Module, str]] = {}
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if name in owner._non_persistent_buffers_set or full in ignored or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            owned[full] = owner, name
    return owned


def own_memory(tensor: Tensor) -> Tensor:
    """A view of each value of an expanded tensor once: torch writes to no memory that has several names."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@torch.no_grad()
def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    # `data`: a graph that was built before (of another model's update in this batch) may still run
    # backward, which never reads running statistics that its forward has written.
    written = [t.data for t in to]
    if any(t.is_conj() or t.is_neg() for t in written):  # `foreach` does not write to them
        for target, value in zip(written, source, strict=True):
            target.copy_(value)
    else:
        torch._foreach_copy_(written, source)
