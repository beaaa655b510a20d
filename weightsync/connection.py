"""What the two sides of a push have agreed on: which rank sends what to which of the engines' workers."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice, zip_longest

from weightsync.plan import Link, Seat, Stream, Turn, Wanted, fingerprint, narrowed, turns_of
from weightsync.planner import distinct

Held = dict[tuple[int, int, int], int]  # digests by (rank, bucket, segment)
Streams = dict[tuple[int, int], Stream]  # by (rank, reader)


@dataclass(kw_only=True)
class Connection:
    """By the engine's name `seats` has the places of its workers and `reads`, once it has connected, the buckets
    (rank, number) that each of them reads. `modules`: all that any of them wants, sorted."""

    name: str
    links: list[Link]
    seats: dict[str, list[Seat]]
    modules: list[str]
    reads: dict[str, list[set[tuple[int, int]]]] = field(default_factory=dict)

    def readers_of(self, engines: Iterable[str]) -> set[int]:
        return {seat.reader for engine in engines for seat in self.seats[engine]}

    def links_to(self, engine: str) -> list[Link]:
        """What the ranks send to an engine."""
        return [link.to(self.readers_of([engine])) for link in self.links]

    def rounds_to(
        self, engines: Iterable[str], modules: Collection[str] | None
    ) -> tuple[Streams, list[list[Turn | None]]]:
        """(what is sent of these modules (None: all), in which round each rank sends which bucket)."""
        readers = self.readers_of(engines)
        streams = {
            (link.rank, stream.reader): narrowed(stream, modules)
            for link in self.links
            for stream in link.streams
            if stream.reader in readers
        }
        own = [turns_of([s for (rank, _), s in streams.items() if rank == link.rank], link.rank) for link in self.links]
        return streams, [list(turns) for turns in zip_longest(*own)]

    def fingerprints(self, engine: str, held: Mapping[int, Held]) -> list[str]:
        """Of what each worker of an engine must hold; `held`: what each reader was sent."""
        return [
            fingerprint({key: digest for key, digest in held[seat.reader].items() if key[:2] in reads})
            for seat, reads in zip(self.seats[engine], self.reads[engine], strict=True)
        ]


def seat_workers(wants: Mapping[str, list[Wanted]]) -> tuple[list[Wanted], list[int], dict[str, list[Seat]]]:
    """(readers, workers of each, each engine's seats), of what the workers of each engine want: workers that want the
    same are one reader."""
    readers, which = distinct(wanted for found in wants.values() for wanted in found)
    sizes = [0] * len(readers)
    seats: dict[str, list[Seat]] = {}
    left = iter(which)
    for name, found in wants.items():
        seats[name] = []
        for number in islice(left, len(found)):
            seats[name].append(Seat(reader=number, member=sizes[number]))
            sizes[number] += 1
    return readers, sizes, seats
