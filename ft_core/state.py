"""The state that heals: how it is saved, served to peers, received and loaded.

A tree of named parts, each with a load and a save function. Large tensors are served and received
*in place*, without a copy: the peer reads the source's own tensors until its optimizer is about to
change them, and the receiver writes into its own.

Memory for an optimizer's state that does not exist yet is *preallocated* before the process joins.
If a fresh process allocated it while its peers' state arrives, the peers would wait for the kernel
to find that memory: measured, 0.4 s per GiB, and up to 3 s on a virtual machine whose host must find
it, too, against 0.2 s for the transfer.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from ft_core.config import JobOptions
from ft_core.heal import (
    NEXT,
    HealError,
    HealKey,
    UnsupportedObjectError,
    digest,
    fetch,
    objects,
    pack,
    unpack,
)
from ft_core.heal.format import byte_view
from ft_core.heal.objects import naming_option
from ft_core.heal.shardings import (
    ShardedModel,
    Sharding,
    at_rest,
    dtensor_type,
    local_part,
    shardings,
)
from ft_core.launch import kept_files
from ft_core.launch.board import slot
from ft_core.launch.kept import Card, Version
from ft_core.process_group.device_memory import DeviceEvent, devices_of, synchronize
from ft_core.replica.events import FetchAgain, Loaded, Overwrite, Published
from ft_core.replica.shares import Shares
from ft_core.replica.status import INITIAL
from ft_core.shell.intra_group import IntraGroup
from ft_core.shell.session import Session
from lighthouse.wire.messages import NOT_COUNTED

log = logging.getLogger("ft_core")

LARGE_BYTES = 1024 * 1024
"""Tensors from this size on are served to healing peers, and received during a step, without a copy
(`ft_core.heal`)."""
PREALLOCATE_BYTES = 64 * 1024 * 1024
"""A smaller optimizer state is not preallocated: the kernel provides its memory quickly."""
CHANGED_WHILE_SERVED = (
    "a tensor of the state was changed before should_commit while a peer healed from it, which heals once "
    "more: from now on peers are given copies"
)
CHANGED_WHILE_RECEIVED = (
    "a tensor of the state was changed before should_commit while it was received from a peer: it is "
    "received once more, and from now on into other memory"
)

KEPT_TRIES = 3
"""The keeper may put a newer version in place of the one that is asked for."""

SAMPLES, SAMPLE_BYTES = 64, 16
"""Of a tensor, at equal distances: its version does not count what is written through `.data`."""

Versions = list[tuple[Tensor, int]]
Seen = list[tuple[Tensor, int, Tensor]]
"""Each large tensor, its version, and a sample of its bytes (`_seen`)."""

Agree = Callable[[Callable[[], str]], str]
Load = Callable[[Any], None]
Save = Callable[[], Any]


class State:
    """A manager's named parts of state, each with its load and save function.

    `batches_committed`: in all committed steps, one per participant and step; heals with the parts.
    `updates`: how often the loop has changed it since the last commit.
    `shares`: the holders of the data's shares, in a job with spares; heals, too.

    Thread: the training loop's, but for `room_to_receive`.
    """

    def __init__(self) -> None:
        self.batches_committed, self.updates = 0, NOT_COUNTED
        self.shares: Shares | None = None
        self.trains = True
        """Whether the step under way is a step of the training. If it is not, shares do not move with its commit, and a
        supervisor sees no progress in it."""
        self._parts: dict[str, tuple[Load, Save]] = {}
        self._read_in_step: set[str] = set()
        self._preallocated: list[PreallocatedState] = []
        self._served: Seen = []
        self._serves: Session | None = None
        """Through which members are served."""
        self._watched: Seen = []  # in the first steps, whether or not a peer reads
        self._copies = False
        """Whether peers are given copies, since the loop changes large tensors before its vote."""
        self.whole: Callable[[], bool] = lambda: True
        """Whether what the parts save now, at a step's boundary, is all of the state, and can be loaded
        here: an integration may be elsewhere in its loop. Asked for observers and for what is kept."""
        self.takes_kept: Callable[[dict[str, Any]], bool] = lambda parts: True
        """Whether this process can go on from these parts, which the supervisor's keeper holds: where what it
        has loaded from a checkpoint says no more than its own step, only an integration knows."""
        self.kept: Version | None = None
        """Of the state with which this process began, if the keeper held it. Read only."""
        self.shows = False
        """Whether a state is served to an observer. Read only."""
        self._shown: tuple[Seen, Version] | None = None  # no step was committed since
        self._withheld = ""
        self._in_place = True
        self.is_used = False
        """The loop uses the state while it waits at a step's boundary: nothing is received into it."""
        self._offered: dict[str, Any] | None = None
        self._offered_at: list[DeviceEvent] = []
        self._received: Versions = []
        self._shardings: list[Sharding] = []
        self._sharded_as: dict[str, list[Sharding]] = {}
        self.sharded_models: dict[str, ShardedModel] = {}
        """Of this manager alone: another one's loop may be in a forward. By the keys of their parts."""

    def register(
        self,
        key: str,
        load: Load,
        save: Save,
        *,
        in_place: bool = True,
        sharded_as: Iterable[Tensor] = (),
    ) -> None:
        """Add or replace a part. `in_place` False: its owner also reads it during a step that
        contributes nothing, so nothing may be received into it then. `sharded_as`: what a peer's part holds
        may be sharded as these are, though here it holds nothing like that yet."""
        self._parts[key] = (load, save)
        self._sharded_as[key] = shardings(list(sharded_as))
        if in_place:
            self._read_in_step.discard(key)
        else:
            self._read_in_step.add(key)

    def held_shares(self) -> dict[str, list[str]]:
        """What goes with the state in a heal or a checkpoint; empty in a job without spares."""
        return {} if self.shares is None else {"shares": list(self.shares.holders)}

    def take_shares(self, tree: Mapping[str, Any]) -> None:
        """What `held_shares` of the state has said that this member takes."""
        if self.shares is not None:
            self.shares = self.shares.loaded(tree.get("shares", ()))

    def preallocate(self, *optimizers: Optimizer) -> None:
        """The parts hold these optimizers' states: `prepare` allocates those that do not exist."""
        self._preallocated += map(PreallocatedState, optimizers)

    def prepare(self) -> None:
        """Allocate what was registered with `preallocate`, and see what is sharded. Call it before this process
        joins, when no peer waits for it."""
        for optimizer_state in self._preallocated:
            optimizer_state.prepare()
        if dtensor_type() is not None:
            with at_rest(self.sharded_models.values()):
                self._shardings = shardings([self._tree(), self._sharded_as])

    def parts(self) -> Iterator[tuple[str, Save]]:
        """Each part's key and save function."""
        for key, (_, save) in self._parts.items():
            yield key, save

    def save(self) -> dict[str, Any]:
        """All parts by key: what their functions return, not copied."""
        with at_rest(self.sharded_models.values()):
            return {key: save() for key, save in self.parts()}

    def sharded(self) -> bool:
        """Whether it holds shards (DTensors). Those are taken at a step's boundary only: to load into what
        FSDP has gathered in forward frees memory that backward still needs, and a rank that takes none
        would then run other collectives than its siblings."""
        return bool(self._shardings)

    def first_lineage(self, options: JobOptions) -> str:
        """Of a start without history: equal states have the same one, and need no transfer. Without
        `init_sync` they are equal in all members, and not looked at."""
        if not options.init_sync:
            return INITIAL + "same"
        with naming_option(options):
            return INITIAL + digest(self.save(), allow_objects=options.heal_allow_objects)

    def begin_as_rank_0(self, options: JobOptions) -> str:
        """The ranks of this group begin with unlike copies: take that of rank 0, as under DistributedDataParallel.
        Returns its lineage. Raises as `IntraGroup.sync_initial_state`."""
        with closing(IntraGroup(options)) as ranks:
            return ranks.sync_initial_state(
                lambda: self.first_lineage(options),
                self.save,
                lambda state: self._load({"user": state}),
            )

    def serve(self, session: Session) -> None:
        """At a step's boundary: serve the state to members that heal from it, large tensors in place
        (`unchanged`); stop serving what is no longer read."""
        status = session.control.status
        position = status.step, status.lineage
        if status.published is not None and not status.still_read:
            session.control.submit(Published(None))
            self.retire(session)
        if not status.targets or status.published == position:
            return
        self.shows, self._shown = False, None  # members come first
        try:
            tree = self._all()
            holds = partial(_holds, session, position)
            session.plane.publish(*position, tree, len(status.targets), holds, copy=self._copies)
        except Exception as error:  # the user's code, or what it has put into the state
            self._withhold(session, position, error)
        else:
            self._served = [] if self._copies else _seen(tree)
        self._serves = session
        session.control.submit(Published(position))

    def withdraw(self) -> bool:
        """The loop goes on to another place without a step (past a batch that all leave out), so what members read
        is of no use any more. Whether there is something: then the attempt must end, to serve them anew."""
        session, self._serves = self._serves, None
        if session is None or session.control.status.published is None:
            return False
        session.control.submit(Published(None))
        self.retire(session)
        return True

    def _all(self) -> dict[str, Any]:
        tree = {"user": self.save(), "batches_committed": self.batches_committed}
        return tree | self.held_shares()

    def show(self, session: Session, *, allow_objects: bool) -> None:
        """At a step's boundary: serve the state to an observer that waits for one, large tensors in
        place until `settle`. It travels packed, as an observer knows none of the user's classes."""
        status = session.control.status
        if self.shows and session.plane.quiet:
            self.retire(session)
        busy = self.shows or status.published is not None
        if busy or not (session.plane.observed(status.step) and self.whole()):
            return
        try:
            manifest, tensors = pack(self._all(), allow_objects)
            packed = {"manifest": manifest, "tensors": tensors}
            holds = partial(_holds, session, (status.step, status.lineage))
            position = status.step, status.lineage
            session.plane.publish(*position, packed, 0, holds, copy=self._copies, shown=True)
        except Exception as error:  # the user's code, or what it has put into the state
            session.plane.withhold(NEXT.step, NEXT.lineage, repr(error))
        else:
            version = Version(status.step, status.lineage, *status.origin)
            self.shows = True
            self._shown = [] if self._copies else _seen(tensors), version

    def settle(self, session: Session) -> Version | None:
        """A step was committed, and the state is about to change: copy what the observer has not read
        yet. Returns the version that was shown, if it has not changed until now."""
        shown, self._shown = self._shown, None
        if shown is None:
            return None
        seen, version = shown
        if _as_seen(seen):
            session.plane.freeze()
            return version
        self._copies = True  # or an observer of such a loop would never have a state
        self.retire(session)
        return None

    def begin_with_kept(
        self, options: JobOptions, place: tuple[str, ...], own: Version, agree: Agree
    ) -> Version | None:
        """Before this process joins: take what the supervisor's keeper holds, if its replica group is to
        begin with that; returns its version.

        Args:
            place: see `Card`.
            own: of the state without the keeper.
            agree: `agree(decide)` is what `decide()` returns in the group's rank 0.
        """
        if self.kept is not None or not (self.whole() and slot().there):
            return None
        into = {"shardings": shardings(self.save())} if options.parts > 1 else None
        found: tuple[Version, dict[str, Any]] | None = None

        def decide() -> str:
            nonlocal found
            found = kept_state(options, place, own, into)
            wanted = found is not None and self.takes_kept(found[1]["user"])
            return json.dumps(asdict(found[0])) if found is not None and wanted else ""

        if not (said := agree(decide)):
            return None
        self.kept = Version(**json.loads(said))
        if found is None:  # another rank has decided
            found = self.kept, fetch_kept(options, self.kept, into)
        self._load(found[1])
        self._count(found[1])
        return self.kept

    def _withhold(self, session: Session, position: tuple[int, str], error: Exception) -> None:
        """A member that asks for the state is not a reason to end this one: tell it why there is
        none, and train on."""
        reason = str(error) if isinstance(error, UnsupportedObjectError) else repr(error)
        if reason != self._withheld:
            self._withheld = reason
            log.error(
                "no process can come back, since the state cannot be given to it; this one trains "
                "on: %s",
                reason,
                exc_info=not isinstance(error, UnsupportedObjectError),
            )
        session.plane.withhold(*position, reason)

    def check(self, *, allow_objects: bool) -> None:
        """A step begins: raise UnsupportedObjectError if something in the state can't travel, and watch
        whether the loop changes it before the vote. Copies no tensor; saves, as each heal does. What the
        user's code raises meanwhile is logged: it may work later."""
        try:
            tree = self.save()
        except Exception as error:
            log.warning(
                "the state cannot be saved now, as a peer that comes back needs it: %r", error
            )
            return
        pack(tree, allow_objects)
        self._watched = _seen(tree)

    def before_vote(self) -> None:
        """Free what `prepare` has allocated: a state was received into it by now, or none will be. If the
        loop changes large tensors in its first steps, copies are served from the next time on."""
        for optimizer_state in self._preallocated:
            optimizer_state.drop()
        watched, self._watched = self._watched, []
        self._copies = self._copies or not _as_seen(watched)

    def committed(self) -> None:
        """A step was committed: the loop's update is next."""
        self.updates, self._served = 0, []

    def retire(self, session: Session, *, copy: bool = False) -> None:
        """The state may change from now on: stop serving it. `copy`: serve copies of what peers have
        not received."""
        self._served, self._serves = [], None
        self.shows, self._shown = False, None
        (session.plane.freeze if copy else session.plane.retire)()

    def unchanged(self) -> bool:
        """Whether the tensors that a peer may have read are as they were when they were first served, in
        this attempt at the step or an earlier one. If they are not, copies are served from the next time
        on."""
        if _as_seen(self._served):
            return True
        log.warning(CHANGED_WHILE_SERVED)
        self._copies, self._served = True, []
        return False

    def offer(self, *, behind: bool) -> None:
        """A step begins whose loop does not wait for its heal. If it is `behind`, what it computes
        contributes nothing, so large tensors may be received in place meanwhile: only the optimizer
        changes those, after the vote, and what a forward changes (the statistics of a BatchNorm) is
        small. If a loop changes them nevertheless, `load` detects it, and later states are received
        into other memory."""
        self._offered = None
        if self._in_place and behind:
            with at_rest(self.sharded_models.values()):
                tree = self._tree(without=self._read_in_step)
            self._offered = tree_map(_if_large, tree) if _versions(tree) else None
            # Not what the step queues from here on: its collectives wait for peers, which wait for the heal.
            self._offered_at = [device.current().mark() for device in devices_of(self._offered)]

    def load(self, session: Session) -> None:
        """Put the fetched state in place. Where the loop has changed it during the step, it is
        fetched again."""
        self.retire(session)  # it has been withdrawn; what is remembered of it goes, too
        received, self._received = self._received, []
        if not _unchanged(received):
            log.warning(CHANGED_WHILE_RECEIVED)
            self._in_place, self._offered = False, None
            session.control.submit(FetchAgain())
            return
        view = session.control.status.view
        assert view is not None
        tree = session.plane.take_state(view.step, view.lineage)
        self._load(tree)
        session.control.submit(Loaded())
        self._count(tree)

    def _load(self, tree: Mapping[str, Any]) -> None:
        """Put the user's parts of a state in place."""
        for key, (load, _) in self._parts.items():
            if key in tree["user"]:
                load(tree["user"][key])

    def _count(self, tree: Mapping[str, Any]) -> None:
        """What a state that is in place says of the training."""
        self.batches_committed = tree["batches_committed"]
        self.take_shares(tree)

    def room_to_receive(self, session: Session, *, in_step: bool) -> Any:
        """Heal thread: the tree into which a fetched state may be received.

        All of this rank's state while the loop waits at its step's boundary; `in_step`: what was
        offered for a step that goes on meanwhile. From here on this rank's state is torn until
        the heal has ended. Where the loop uses the state: only how it is sharded, for new memory.
        """
        self._received, self._shown = [], None  # what is shown may change from now on
        offered = self._offered
        uses = self.is_used or (in_step and offered is None)
        if uses or not session.control.submit(Overwrite(in_step)).overwriting:
            return {"shardings": self._shardings}
        if in_step:
            # The loop may run: what it changes before this is overwritten, and later is noticed.
            tree, self._received = offered, _versions(offered)
            for queued in self._offered_at:
                queued.synchronize()
        else:
            tree = self._tree()
            synchronize(tree)
        return {"user": tree, "batches_committed": 0, "shardings": self._shardings}

    def _tree(self, without: Set[str] = frozenset()) -> dict[str, Any]:
        """The tensors into which a state may be received, by part."""
        with ExitStack() as stack:
            for optimizer_state in self._preallocated:
                stack.enter_context(optimizer_state.shown())
            return {key: save() for key, save in self.parts() if key not in without}


def _holds(session: Session, position: tuple[int, str]) -> bool:
    """Whether this rank's state is at `position`, and is the quorum's, as far as is known now."""
    status = session.control.status
    return (status.step, status.lineage) == position and not status.healing


def _if_large(leaf: Any) -> Tensor | None:
    if not isinstance(leaf, Tensor):
        return None
    part: Tensor = local_part(leaf)
    large = part.nbytes >= LARGE_BYTES and part.is_contiguous()
    return leaf if large and not part.is_inference() else None  # which is served as a copy


def _versions(tree: Any) -> Versions:
    """The large tensors of a tree, with how often each was changed so far."""
    found: Versions = []
    for leaf in tree_leaves(tree):
        if (large := _if_large(leaf)) is not None:
            part = local_part(large)  # which counts its changes, whatever DTensor has made them
            found.append((part, part._version))
        elif within := objects.inside(leaf):
            found += _versions(within)
    return found


def _seen(tree: Any) -> Seen:
    """The large tensors of a tree as they are now."""
    return [(tensor, version, _sample(tensor).clone()) for tensor, version in _versions(tree)]


def _as_seen(seen: Seen) -> bool:
    return all(
        tensor._version == version and torch.equal(_sample(tensor), sample)
        for tensor, version, sample in seen
    )


def _sample(tensor: Tensor) -> Tensor:
    """Bytes of a large tensor, as a view. None of one on a device, which this thread would wait for: there it is
    left to the comparison of states."""
    if not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        return torch.empty(0)
    distance = tensor.nbytes // SAMPLES
    return byte_view(tensor)[: SAMPLES * distance].view(SAMPLES, distance)[:, :SAMPLE_BYTES]


def _unchanged(versions: Versions) -> bool:
    return all(tensor._version == version for tensor, version in versions)


# ---------------------------------------------------------------- what the keeper holds


def kept_state(
    options: JobOptions, place: tuple[str, ...], own: Version, into: Any
) -> tuple[Version, dict[str, Any]] | None:
    """(version, this rank's part of the state), if a process that has no more than `own` begins with what the
    keeper holds; else None. `place`: see `Card`; `into`: how this rank's parts of tensors are sharded. The
    training loop's thread, before the process joins."""
    if slot().others_train():
        return None
    for _ in range(KEPT_TRIES):
        row, on_disk = slot().keepers_card(), None
        if row is None:
            on_disk = kept_files.read(options.job_id)
        card = Card.of(row) if row is not None else on_disk[0] if on_disk is not None else None
        if (
            card is None
            or card.version is None
            or (card.place, card.parts) != (place, options.parts)
        ):
            return None
        version = card.version
        if not version.begins_with(own):
            return None
        try:
            return version, fetch_kept(options, version, into)
        except HealError as error:
            log.warning("the kept state of step %s can't be had: %s", version.step, error)
    return None


def fetch_kept(options: JobOptions, version: Version, into: Any) -> dict[str, Any]:
    """This rank's part of the version, which the keeper holds, or has written. Raises HealError."""
    part = options.group_rank if options.parts > 1 else 0
    row, began = slot().keepers_card(part), time.monotonic()
    if row is not None:
        deadline = began + options.timeouts.heal_timeout_s
        key = HealKey(version.step, version.lineage)
        packed, _ = fetch([Card.of(row).address], key, deadline=deadline, options=options)
    else:
        on_disk = kept_files.read(options.job_id)
        if on_disk is None or on_disk[0].version != version or part >= len(on_disk[1]):
            raise HealError("the keeper has died")
        packed = on_disk[1][part]
    took_s = time.monotonic() - began
    log.info("begins with the state of step %s, which was kept (%.2f s)", version.step, took_s)
    tree: dict[str, Any] = unpack(
        packed["manifest"], packed["tensors"], into=into, allow_objects=options.heal_allow_objects
    )
    return tree


# ---------------------------------------------------------------- an optimizer's state in advance


class PreallocatedState:
    """What `optimizer.state` will be after its first step, in memory. Training thread."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._spare: dict[Tensor, dict[str, Any]] = {}

    def prepare(self) -> None:
        """Allocate, unless the optimizer has a state or its state cannot be foreseen."""
        if self._optimizer.state or self._spare:
            return
        try:
            shapes = _foresee(self._optimizer)
        except Exception as error:  # not one of torch's: it will heal into new memory
            log.debug("no memory is prepared for %s: %s", type(self._optimizer).__name__, error)
            return
        large = [t for s in shapes.values() for t in s.values() if _is_meta(t)]
        sharded = any(local_part(parameter) is not parameter for parameter in shapes)
        if sharded or sum(tensor.nbytes for tensor in large) >= PREALLOCATE_BYTES:
            self._spare = {
                parameter: {key: _allocated(value, parameter) for key, value in values.items()}
                for parameter, values in shapes.items()
            }

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within it the optimizer's state dict has the preallocated tensors."""
        state = self._optimizer.state
        if state or not self._spare:
            yield
            return
        state.update(self._spare)
        try:
            yield
        finally:
            state.clear()

    def drop(self) -> None:
        """Release the memory: a state was received into it by now, or none will be."""
        self._spare = {}


def _foresee(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """The state that a step would create: one runs on tensors without memory ("meta").

    Of torch's own optimizers only: what another one's step does is not known (collectives).
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        raise ValueError("not one of torch.optim")
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    twin.state = defaultdict(dict)
    twin.param_groups, twins = [], {}
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = {}
    plain = {"foreach": False, "fused": False, "capturable": False}
    for group in optimizer.param_groups:
        mine = group | {key: value for key, value in plain.items() if key in group}
        mine["params"] = []
        for parameter in group["params"]:
            if type(parameter) not in (Tensor, nn.Parameter, dtensor_type()):
                raise ValueError(f"a {type(parameter).__name__}")
            if parameter.device.type not in ("cpu", "cuda"):
                raise ValueError(f"a parameter on {parameter.device}")
            part = local_part(parameter).detach()
            meta = nn.Parameter(torch.empty_like(part, device="meta"), requires_grad=False)
            meta.grad = torch.empty_like(meta) if parameter.requires_grad else None
            twins[meta] = parameter
            mine["params"].append(meta)
        twin.param_groups.append(mine)
    type(optimizer).step(twin)
    for meta, values in twin.state.items():
        if local_part(twins[meta]) is not twins[meta]:
            _check_shapes(meta, values)
    return {twins[meta]: values for meta, values in twin.state.items()}


def _check_shapes(part: Tensor, values: dict[str, Any]) -> None:
    """Raise ValueError if something in a shard's state is not sharded as the shard is."""
    for key, value in values.items():
        if _is_meta(value) and value.shape != part.shape:
            raise ValueError(f"{key} of {tuple(value.shape)} for a shard of {tuple(part.shape)}")


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _allocated(value: Any, parameter: Tensor) -> Any:
    if not _is_meta(value):
        return value
    made = torch.empty_strided(
        value.size(), value.stride(), dtype=value.dtype, device=parameter.device
    )
    made.zero_()  # not torch.zeros, whose memory is there when it is touched
    if local_part(parameter) is parameter:
        return made
    return Sharding.of(parameter).make(made, parameter.shape)
