"""The samples that are left of an epoch which a checkpoint was saved within.

Lightning resumes at a batch's number, and reads the loader from its beginning. Here an epoch goes on with
the samples that were not read, also if it has another number of processes now, or other batches.

The samples of an epoch have one order, which follows from the sampler's seed and the epoch's number. Of
that n processes read each n-th sample. After k batches of b samples the first k * b * n of the order are
read. The rest is divided among the processes that there are now, as a sampler divides the whole. This
holds for the `DistributedSampler` that Lightning puts into a `DataLoader` over a map-style dataset.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler


@dataclass(frozen=True, slots=True)
class Origin:
    """How the batches of an epoch are numbered: batch number `batch` begins at place `sample` of the
    epoch's order. Other epochs begin at their first sample."""

    epoch: int = 0
    batch: int = 0
    sample: int = 0

    def of(self, epoch: int) -> Origin:
        """That of `epoch`."""
        return self if epoch == self.epoch else Origin(epoch)


def samples_of_a_batch(loader: Any) -> int:
    """How many samples all processes read with a batch; 0: that, or their order, can't be said."""
    batches: Any = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(loader, "sampler", None)
    kind = getattr(type(batches), "_ft_original", type(batches))
    if kind is not BatchSampler or type(sampler) is not DistributedSampler:
        return 0
    return int(batches.batch_size) * sampler.num_replicas


def batches_left(loader: Any, origin: Origin) -> list[list[int]]:
    """This process's batches from `origin` on, of a loader of which `samples_of_a_batch` is known. The
    last samples are repeated or left out as the sampler does it."""
    sampler, batches = loader.sampler, loader.batch_sampler
    whole: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
    )
    whole.set_epoch(origin.epoch)
    left, processes = list(whole)[origin.sample :], sampler.num_replicas
    uneven = len(left) % processes
    if uneven and sampler.drop_last:
        left = left[:-uneven]
    elif uneven:
        missing = processes - uneven
        left += (left * missing)[:missing]
    mine, size = left[sampler.rank :: processes], batches.batch_size
    found = [mine[start : start + size] for start in range(0, len(mine), size)]
    if found and batches.drop_last and len(found[-1]) < size:
        found.pop()
    return found


def read_so_far(loader: Any, origin: Origin) -> dict[str, int]:
    """For a checkpoint: what `goes_on` needs to know of the epoch under way. `loader`: None, if the samples
    of several make a batch."""
    return {**asdict(origin), "samples of a batch": samples_of_a_batch(loader)}


def goes_on(
    loader: Any, before: dict[str, int], *, epoch: int, done: int, same_world: bool
) -> tuple[Origin, int] | None:
    """How the batches of an epoch, of which `done` were read, are numbered now, and the number of
    the next; None: it can't be said which samples are left.

    `before`: what `read_so_far` returned when that checkpoint was saved; or nothing. `same_world`: by as
    many processes as there are now.
    """
    were, each = before.get("samples of a batch", 0), samples_of_a_batch(loader)
    origin = Origin(epoch)
    if before.get("epoch", epoch) == epoch:
        origin = Origin(epoch, before.get("batch", 0), before.get("sample", 0))
    if same_world and were in (0, each):
        return origin, done
    if not were or not each:
        return None
    read = origin.sample + (done - origin.batch) * were
    left = len(batches_left(loader, Origin(epoch, 0, read)))
    number = max(0, len(loader) - left)
    return Origin(epoch, number, read), number


def what_is_not_known(before: int, now: int, batch: int) -> str:
    """A sentence for the user: `before` processes have saved this checkpoint, `now` go on."""
    return (
        f"this checkpoint was saved within an epoch, by {before} processes; with {now} the epoch "
        f"goes on at batch {batch:,}, and of its samples some are seen twice or not "
        "at all: other ones can be told apart only with a DataLoader over a map-style dataset, "
        "and the sampler that Lightning puts into it. From the next epoch on each is seen once"
    )
