"""Waiting for ranks: which failure of several is told, as what, and with whose name."""

import errno
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch

from actors import group
from actors.group import wait_all
from rl.faults import RoleDied, RoleOutOfMemory, RoleTimeout, is_out_of_memory, reason_of
from rl.numerics import MismatchError

NAMES = ["policy rank 0", "policy rank 1"]
# What Ray says of a process that has gone.
DEATH = """The actor died unexpectedly before finishing this task.
\tclass_name: Host
\tactor_id: 01
The actor is dead because its worker process has died. There are some potential root causes. (1) The process is killed \
by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called."""
CPU = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"
SHORT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError(f"{CPU}\nframe #0: c10::alloc_cpu(unsigned long)"),
    RuntimeError("std::bad_alloc"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("rollout engine 0 died while sampling: OutOfMemoryError('CUDA out of memory.')"),
]


def raised(error: Exception) -> Exception:
    """As a call to an actor raises it."""
    return ray.exceptions.RayTaskError("update", "Traceback: ...", error, "ray::Host", 1, "127.0.0.1")


def death() -> Exception:
    return ray.exceptions.RayActorError("01", DEATH)


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`wait(answers)` waits for two ranks, which answer in the order of `answers`; one that is missing never does."""

    def wait(answers: dict[int, Any]) -> list[Any]:
        def pretended_wait(refs: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
            return [ref for ref in answers if ref in refs][:1], []

        def pretended_get(ref: int) -> Any:
            if isinstance(answers[ref], Exception):
                raise answers[ref]
            return answers[ref]

        monkeypatch.setattr(group.ray, "wait", pretended_wait)
        monkeypatch.setattr(group.ray, "get", pretended_get)
        return wait_all([0, 1], NAMES, "policy.update", 5.0)

    return wait


def test_results_come_in_order_of_the_ranks(wait: Callable[..., list[Any]]) -> None:
    assert wait({1: "b", 0: "a"}) == ["a", "b"]


def test_silence_names_who_is_silent(wait: Callable[..., list[Any]]) -> None:
    with pytest.raises(RoleTimeout, match=r"phase policy\.update: no answer in 5 s from policy rank 0"):
        wait({1: "b"})


@pytest.mark.parametrize("error", SHORT, ids=lambda e: type(e).__name__)
def test_every_kind_of_missing_memory_is_one_error_with_advice(error: Exception, wait: Callable[..., Any]) -> None:
    assert is_out_of_memory(error)
    with pytest.raises(RoleOutOfMemory) as caught:
        wait({1: raised(error)})
    message = str(caught.value)
    assert message.startswith("phase policy.update: policy rank 1: out of memory (")
    for piece in ["trainer.micro_batch_tokens", "trainer.zero_stage", "trainer.recompute", "trainer.offload_optimizer"]:
        assert piece in message
    assert len(message.splitlines()) == 1 and "frame" not in message


@pytest.mark.parametrize("error", [ValueError("no memory of that"), OSError(errno.ENOSPC, "No space left on device")])
def test_other_exceptions_keep_their_type_and_note_who_raised_them(error: Exception, wait: Callable[..., Any]) -> None:
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as caught:
        wait({1: raised(error)})
    assert caught.value is error and error.__notes__ == ["phase policy.update: raised in policy rank 1"]


@pytest.mark.parametrize(
    ("later", "kind"), [(raised(MemoryError()), RoleOutOfMemory), (death(), RoleDied)], ids=["memory", "death"]
)
def test_a_broken_collective_does_not_hide_what_broke_it(
    later: Exception, kind: type[Exception], wait: Callable[..., Any]
) -> None:
    """The peer of a rank that ends is often the first to answer."""
    with pytest.raises(kind, match="policy rank 1"):
        wait({0: raised(RuntimeError("Connection closed by peer")), 1: later})


def test_of_several_exceptions_the_first_is_told(wait: Callable[..., Any]) -> None:
    with pytest.raises(MismatchError, match="first"):
        wait({1: raised(MismatchError("first")), 0: raised(MismatchError("second"))})


def test_a_death_is_told_without_rays_advice_and_may_have_been_for_memory(wait: Callable[..., Any]) -> None:
    with pytest.raises(RoleDied) as caught:
        wait({0: death()})
    message = str(caught.value)
    assert message.startswith("phase policy.update: the process of policy rank 0 is gone: The actor died unexpectedly")
    assert "class_name" not in message and "ray stop" not in message
    assert "memory ran out" in message and "trainer.micro_batch_tokens" in message


def test_an_engine_gets_advice_of_its_own() -> None:
    for error in (raised(torch.OutOfMemoryError("CUDA out of memory.")), death()):
        said = reason_of(error, "rollout engine 0")
        assert "rollout.kv_cache_bytes" in said and "trainer." not in said


def test_a_reason_has_all_lines_of_the_actors_message_and_no_traceback() -> None:
    assert reason_of(raised(ValueError("one\ntwo")), "policy rank 0") == "one\ntwo"
    assert reason_of(raised(ValueError()), "policy rank 0") == "ValueError()"
