"""Broadcasts from one rank to the workers of a reader, which are threads here."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.channels.collective import Broadcaster, GroupAddress, Listener, serve

NUM_BYTES, NUM_SLOTS = 4096, 2
MEET_S = 60.0
BUCKET: Any = SimpleNamespace(ranges=[(0, 1024), (1024, 3072), (3072, 4096)])


@contextmanager
def broadcasting(num_workers: int, timeout_s: float) -> Iterator[tuple[Broadcaster, list[Listener]]]:
    store = serve("127.0.0.1", MEET_S)
    address = GroupAddress(
        host="127.0.0.1",
        port=store.port,
        name="test",
        slot_bytes=NUM_BYTES,
        sizes=(num_workers,),
        readers=(0,),
        meet_s=MEET_S,
        timeout_s=timeout_s,
    )
    rank = Broadcaster(address, NUM_SLOTS)
    with ThreadPoolExecutor(num_workers) as threads:
        coming = [threads.submit(Listener, address, 0, member) for member in range(num_workers)]
        rank.connect()
        listeners = [found.result() for found in coming]
    del coming
    try:
        yield rank, listeners
    finally:
        rank.close()
        listeners.clear()


def memory() -> torch.Tensor:
    return torch.zeros(NUM_BYTES, dtype=torch.uint8)


def send(rank: Broadcaster, index: int, value: int) -> None:
    rank.slot(index).fill_(value)
    rank.send(index, 0, BUCKET)


def test_every_worker_gets_every_round() -> None:
    with broadcasting(3, timeout_s=30.0) as (rank, listeners), ThreadPoolExecutor(3) as threads:
        for number in range(2 * NUM_SLOTS + 1):
            send(rank, number % NUM_SLOTS, number + 1)
            found = [threads.submit(listener.receive, 0, BUCKET, memory()) for listener in listeners]
            assert all(bytes(each.result()) == bytes([number + 1]) * NUM_BYTES for each in found)


def outcome(listener: Listener) -> str:
    """Why a round does not arrive; empty when it does."""
    try:
        listener.receive(0, BUCKET, memory())
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("gone", range(3))
def test_worker_that_leaves_frees_all_others_before_their_deadline(gone: int) -> None:
    """In gloo's tree of four the first worker passes on to the third, and the rank to the others."""
    with broadcasting(3, timeout_s=10.0) as (rank, listeners), ThreadPoolExecutor(3) as threads:
        send(rank, 0, 1)
        for found in [threads.submit(listener.receive, 0, BUCKET, memory()) for listener in listeners]:
            found.result()
        del listeners[gone]
        waiting = [threads.submit(outcome, listener) for listener in listeners]
        send(rank, 1, 2)
        reasons = [each.result() for each in waiting]
        assert not any(re.search("timed out|timeout", why, re.IGNORECASE) for why in reasons), reasons
        send(rank, 0, 3)  # whoever is left need not hear it, and the rank need not know


def test_worker_that_stalls_keeps_others_no_longer_than_a_broadcast_may_take() -> None:
    with broadcasting(3, timeout_s=0.5) as (rank, listeners), ThreadPoolExecutor(2) as threads:
        send(rank, 0, 1)
        found = [threads.submit(outcome, listener) for listener in listeners[1:]]
        assert any("500ms" in each.result() for each in found)  # the other may be freed by that
