"""What sleeps gives its memory back, and wakes bit for bit, with all of its views."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.sleep import SMALLEST_BYTES, Sleeper, bring_back, own_weights, put_aside, state_storages, tensors_in

ENOUGH = SMALLEST_BYTES // 4


def tied_model() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    return model


@given(st.integers(ENOUGH, 3 * ENOUGH), st.integers(0, 2**31 - 1))
def test_storage_wakes_bit_for_bit_with_its_views(count: int, seed: int) -> None:
    flat = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    flat[0] = float("nan")
    view, wanted = flat[7:ENOUGH].view(-1, 1), flat.clone()
    entry = put_aside(flat.untyped_storage(), "cpu")
    assert entry is not None and entry.num_bytes == 4 * count
    assert flat.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0
    bring_back(entry)
    assert torch.equal(flat.view(torch.int32), wanted.view(torch.int32))
    assert torch.equal(view[:, 0], wanted[7:ENOUGH])


def test_small_and_empty_storages_stay_awake() -> None:
    for size in (0, ENOUGH - 1):
        assert put_aside(torch.zeros(size).untyped_storage(), "cpu") is None


def test_tied_weights_sleep_once() -> None:
    model = tied_model()
    assert [s.nbytes() for s in state_storages(model, "cpu")["parameters"]] == [4 * 64 * 64]
    sleeper = Sleeper(device="cpu")
    sleeper.sleep(model, ("parameters",))
    assert sleeper.num_bytes() == {"parameters": 4 * 64 * 64}
    assert state_storages(model, "cpu")["parameters"][0].nbytes() == 0


def test_sleeping_twice_keeps_what_sleeps_and_waking_twice_is_nothing() -> None:
    model, sleeper = tied_model(), Sleeper(device="cpu")
    wanted = model[0].weight.detach().clone()
    for _ in range(2):
        sleeper.sleep(model, ("parameters", "optimizer"))
    assert sleeper.num_bytes() == {"parameters": 4 * 64 * 64, "optimizer": 0}
    for _ in range(2):
        sleeper.wake(("parameters", "optimizer"))
    assert torch.equal(model[1].weight, wanted) and sleeper.num_bytes() == {}


def test_borrowed_weights_sleep_once_they_are_owned() -> None:
    model = torch.nn.Linear(64, 64, bias=False)
    model.weight.data.numpy()  # numpy's view forbids emptying the storage, as a mapped file does
    assert put_aside(model.weight.untyped_storage(), "cpu") is None
    own_weights(model)
    assert put_aside(model.weight.untyped_storage(), "cpu") is not None


def test_part_that_fails_to_sleep_keeps_what_sleeps_already(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    wanted = [parameter.detach().clone() for parameter in model.parameters()]
    third = list(model.parameters())[2].untyped_storage()._cdata

    def full(storage: Any, device: str) -> Any:
        if storage._cdata == third:
            raise OSError("No space left on device")
        return put_aside(storage, device)

    sleeper = Sleeper(device="cpu")
    monkeypatch.setattr("actors.sleep.put_aside", full)
    with pytest.raises(OSError, match="No space"):
        sleeper.sleep(model, ("parameters",))
    assert sleeper.num_bytes() == {"parameters": 2 * 4 * 64 * 64}
    sleeper.wake(("parameters",))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted, strict=True))


def test_file_that_lost_its_end_is_an_error() -> None:
    entry = put_aside(torch.zeros(2 * ENOUGH).untyped_storage(), "cpu")
    assert entry is not None
    entry.file.truncate(SMALLEST_BYTES)
    with pytest.raises(OSError, match=f"{SMALLEST_BYTES} of {2 * SMALLEST_BYTES} bytes"):
        bring_back(entry)


def test_tensors_are_found_in_nested_state_with_their_gradients_but_not_in_models() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    state: dict[Any, Any] = {weight: {"exp_avg": torch.zeros(2), "step": 4}, "more": [(torch.zeros(1),), None]}
    state["loop"] = state
    state["model"] = tied_model()
    assert sorted(tensor.numel() for tensor in tensors_in(state)) == [1, 2, 3, 3]
