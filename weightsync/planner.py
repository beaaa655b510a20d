"""Making plans: regions held, met with regions wanted. Pure.

A rank is planned for all readers at once, as arrays: at thousands of links between ranks and readers, an object for
each bucket's modules would cost minutes and gigabytes. Only what a push runs by is made of them (`streams_of`).
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from weightsync.plan import ALIGN_BYTES, Bucket, PlanError, Segment, Stream, Wanted, aligned
from weightsync.regions import Ints, Moves, Regions, intersect


@dataclass(frozen=True, kw_only=True)
class Readers:
    """What several readers want, joined: the buffers of all are numbered on, and so are their modules.

    `reader`, `module`, `item_bytes` and `first` (the reader's first buffer) are by buffer, [num_buffers] int64.
    """

    wants: tuple[Wanted, ...]
    regions: Regions
    reader: Ints
    module: Ints
    item_bytes: Ints
    first: Ints

    @property
    def num_bytes(self) -> int:
        """Bytes of everything that is wanted: no plan sends less."""
        return sum(wanted.num_bytes() for wanted in self.wants)


def join_readers(wants: Sequence[Wanted]) -> Readers:
    """Of what distinct readers want of the same tensors. Raises PlanError for none, or when the tensors differ."""
    if not wants:
        raise PlanError("no reader: a plan needs at least one engine")
    if any(wanted.names != wants[0].names for wanted in wants):
        raise PlanError("the readers want tensors of different models; plan for engines of one model")
    counts = np.array([len(wanted.buffers) for wanted in wants], np.int64)
    firsts = np.cumsum(counts) - counts
    parts, modules, num_modules = [], [], 0
    for wanted, first in zip(wants, firsts.tolist(), strict=True):
        parts.append(Regions(**{**vars(wanted.regions), "buffer": wanted.regions.buffer + first}))
        modules.append(wanted.module_of(np.arange(len(wanted.buffers))) + num_modules)
        num_modules += len(wanted.modules)
    return Readers(
        wants=tuple(wants),
        regions=Regions.concat(parts),
        reader=np.repeat(np.arange(len(wants)), counts),
        module=np.concatenate(modules),
        item_bytes=np.concatenate([wanted.item_bytes(np.arange(len(wanted.buffers))) for wanted in wants]),
        first=np.repeat(firsts, counts),
    )


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What one rank sends: N moves, reader after reader, in load order; targets are numbers of the reader's buffers.

    `reader` and `sizes` (bytes in a bucket) are [N] int64; `begin` [B] has the first move of each bucket.
    """

    moves: Moves
    reader: Ints
    sizes: Ints
    begin: Ints

    @property
    def bucket_bytes(self) -> Ints:
        """[B] bytes of each bucket."""
        return np.add.reduceat(self.sizes, self.begin) if len(self.begin) else self.begin

    def bytes_to(self, num_readers: int) -> Ints:
        """[num_readers] bytes to each reader."""
        return np.bincount(self.reader, self.sizes, num_readers).astype(np.int64)

    def fingerprint(self) -> str:
        return digest_of([*vars(self.moves).values(), self.reader, self.sizes, self.begin])


def plan_rank(held: Regions, readers: Readers, slot_bytes: int) -> RankPlan:
    """What a rank that holds `held` sends to each reader, in buckets of at most `slot_bytes`."""
    moves = intersect(held, readers.regions)
    # As they lie in the module: what a bucket has whole can be used where it lies.
    moves = moves.take(np.lexsort((moves.target_at, moves.target, readers.module[moves.target])))
    moves = split_large(moves, readers.item_bytes[moves.target], slot_bytes)
    sizes = aligned(moves.num_elements * readers.item_bytes[moves.target])
    reader, module = readers.reader[moves.target], readers.module[moves.target]
    ends = np.cumsum(sizes)
    begin = []
    for number in np.unique(reader).tolist():
        first, stop = np.searchsorted(reader, [number, number + 1]).tolist()
        while first < stop:
            begin.append(first)
            room = int(ends[first] - sizes[first]) + slot_bytes
            cut = min(int(np.searchsorted(ends, room, side="right")), stop)
            first = whole_until(module, ends, first, cut, slot_bytes)
    own = Moves(**{**vars(moves), "target": moves.target - readers.first[moves.target]})
    return RankPlan(moves=own, reader=reader, sizes=sizes, begin=np.array(begin, np.int64))


def whole_until(module: Ints, ends: Ints, first: int, cut: int, slot_bytes: int) -> int:
    """Where a bucket of the moves [first, cut) ends instead, if a module that fits into the next would be cut.

    `module` and `ends` are by move: its module's number, which ascends, and the bytes up to its end.
    """
    if cut == len(module) or module[cut] != module[cut - 1]:
        return cut
    begin, end = np.searchsorted(module, [module[cut], module[cut] + 1]).tolist()
    return begin if begin > first and ends[end - 1] - ends[begin - 1] <= slot_bytes else cut


def streams_of(plan: RankPlan, wants: Sequence[Wanted]) -> tuple[Stream, ...]:
    """The plan as a push runs by it: a stream to each reader that anything is sent to."""
    ends = [*plan.begin.tolist()[1:], len(plan.moves)]
    buckets: dict[int, dict[int, Bucket]] = {}
    for begin, end in zip(plan.begin.tolist(), ends, strict=True):
        reader = int(plan.reader[begin])
        own = buckets.setdefault(reader, {})
        own[len(own)] = bucket_of(plan.moves.take(np.arange(begin, end)), plan.sizes[begin:end], wants[reader])
    return tuple(Stream(reader=reader, buckets=own) for reader, own in buckets.items())


def bucket_of(moves: Moves, sizes: Ints, wanted: Wanted) -> Bucket:
    """Moves in order, of `sizes` bytes, one behind another."""
    modules = [wanted.buffers[buffer].module for buffer in moves.target.tolist()]
    changes = [0, *(k for k in range(1, len(modules)) if modules[k] != modules[k - 1]), len(modules)]
    stops = [0, *np.cumsum(sizes).tolist()]
    segments = tuple(
        Segment(module=modules[a], first=a, last=b, begin=stops[a], end=stops[b]) for a, b in pairwise(changes)
    )
    return Bucket(moves=moves, offset=np.array(stops[:-1], np.int64), segments=segments, nbytes=stops[-1])


def plan_streams(held: Regions, wants: Sequence[Wanted], slot_bytes: int) -> tuple[Stream, ...]:
    """What a rank that holds `held` sends, to each reader that it has anything for, in buckets of at most
    `slot_bytes`."""
    return streams_of(plan_rank(held, join_readers(wants), slot_bytes), wants)


def split_large(moves: Moves, item_bytes: Ints, slot_bytes: int) -> Moves:
    """Moves of more than a bucket cut into such of whole runs, or of parts of a run."""
    room = (slot_bytes - ALIGN_BYTES) // item_bytes
    large = moves.num_elements > room
    if not large.any():
        return moves
    found, done = [], 0
    for n in np.flatnonzero(large).tolist():
        found.append(moves.take(np.arange(done, n)))
        done = n + 1
        count, length = int(moves.count[n]), int(moves.length[n])
        high, wide = max(1, int(room[n]) // length), min(length, int(room[n]))
        for run in range(0, count, high):
            for begin in range(0, length, wide):
                found.append(submove(moves, n, run, min(high, count - run), begin, min(wide, length - begin)))
    found.append(moves.take(np.arange(done, len(moves))))
    return Moves.concat(found)


def submove(moves: Moves, n: int, run: int, count: int, begin: int, length: int) -> Moves:
    """Runs [run, run + count) of move n, of each the elements [begin, begin + length)."""
    one = moves.take(np.array([n]))
    shifted = {
        f"{side}_at": getattr(one, f"{side}_at")
        + run * getattr(one, f"{side}_row")
        + begin * getattr(one, f"{side}_col")
        for side in ("source", "target")
    }
    return Moves(**{**vars(one), **shifted, "count": np.array([count]), "length": np.array([length])})


class Tally:
    """What all ranks send, summed up as they are planned: bytes of links, buckets, elements of tensors."""

    def __init__(self, readers: Readers):
        self._readers = readers
        self.links: list[list[int]] = []  # [ranks][readers] bytes
        self.num_moves = self.num_buckets = self.num_rounds = self.max_bucket_bytes = 0
        self._sent = np.zeros((len(readers.wants), len(readers.wants[0].names)), np.int64)  # elements
        self._digest = hashlib.sha256()

    def add(self, plan: RankPlan) -> None:
        """The plan of the next rank."""
        self.links.append(plan.bytes_to(len(self._readers.wants)).tolist())
        self.num_moves += len(plan.moves)
        self.num_buckets += len(plan.begin)
        self.num_rounds = max(self.num_rounds, len(plan.begin))  # each rank sends one bucket in a round
        self.max_bucket_bytes = max(self.max_bucket_bytes, int(plan.bucket_bytes.max(initial=0)))
        np.add.at(self._sent, (plan.reader, plan.moves.tensor), plan.moves.num_elements)
        self._digest.update(plan.fingerprint().encode())

    @property
    def num_bytes(self) -> int:
        return sum(map(sum, self.links))

    @property
    def plan_hash(self) -> str:
        """Of the plans of all ranks."""
        return self._digest.hexdigest()[:16]

    def require_whole(self) -> None:
        """Raises PlanError, naming tensors, unless every element that a reader wants is sent to it exactly once."""
        require_sent(self._readers.wants, list(self._sent))


def require_whole(streams: Iterable[Stream], readers: Sequence[Wanted]) -> None:
    """Raises PlanError, naming tensors, unless every element that a reader wants is sent to it exactly once.

    As what two ranks hold does not overlap, counting is enough.
    """
    sent_to = [np.zeros(len(wanted.names), np.int64) for wanted in readers]
    for stream in streams:
        for bucket in stream.buckets.values():
            np.add.at(sent_to[stream.reader], bucket.moves.tensor, bucket.moves.num_elements)
    require_sent(readers, sent_to)


def require_sent(readers: Sequence[Wanted], sent_to: Sequence[Ints]) -> None:
    """Raises PlanError unless to each reader [tensors] elements were sent as it wants of each."""
    for wanted, sent in zip(readers, sent_to, strict=True):
        asked = np.zeros(len(wanted.names), np.int64)
        np.add.at(asked, wanted.regions.tensor, wanted.regions.num_elements)
        wrong = np.flatnonzero(sent != asked)
        if len(wrong):
            shown = ", ".join(f"{wanted.names[t]} ({sent[t]} of {asked[t]} elements)" for t in wrong[:8])
            more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise PlanError(f"the ranks of the trainer do not hold what an engine wants: {shown}{more}")


def distinct(wants: Iterable[Wanted]) -> tuple[list[Wanted], list[int]]:
    """The readers among workers, and which of them each worker is."""
    numbers: dict[str, int] = {}
    found: list[Wanted] = []
    which: list[int] = []
    for wanted in wants:
        number = numbers.setdefault(wanted.fingerprint(), len(found))
        if number == len(found):
            found.append(wanted)
        which.append(number)
    return found, which


def regions_fingerprint(regions: Regions) -> str:
    """Equal for ranks that hold the same."""
    return digest_of(list(vars(regions).values()))


def digest_of(arrays: Sequence[Ints]) -> str:
    """Hash of arrays of int64, in their order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(str(len(array)).encode())
        digest.update(np.ascontiguousarray(array, np.int64).tobytes())
    return digest.hexdigest()[:16]
