"""Bytes of tensors: what lives, and the most at once, counted by hand."""

import gc

import torch

from actors.tensor_bytes import live_bytes, peak_bytes

MB = 4 * 512 * 512


def test_live_bytes_count_a_shared_storage_once() -> None:
    before = live_bytes("cpu")
    kept = torch.zeros(512, 512)
    views = [kept[:10], kept.t(), torch.nn.Parameter(kept)]
    assert live_bytes("cpu") - before == MB
    del kept, views
    assert live_bytes("cpu") == before


def test_peak_is_the_most_at_once_not_the_sum() -> None:
    def chain() -> torch.Tensor:
        found = torch.ones(512, 512)
        for _ in range(5):
            found = found + 1  # two at once
        return found.sum()

    gc.collect()  # of other tests
    before = live_bytes("cpu")
    result, peak = peak_bytes(chain, "cpu")
    assert float(result) == 6 * 512 * 512
    assert 2 * MB <= peak - before < 2 * MB + 1000


def test_peak_counts_what_a_backward_pass_keeps() -> None:
    layer, rows = torch.nn.Linear(512, 512, bias=False), torch.zeros(512, 512)
    before = live_bytes("cpu")
    _, peak = peak_bytes(lambda: layer(rows).square().sum().backward(), "cpu")
    assert layer.weight.grad is not None
    assert 3 * MB <= peak - before <= 4 * MB + 1000  # output and its square, or output, its gradient and the weight's


def test_peak_counts_storages_that_grow_in_place() -> None:
    buffer = torch.empty(0)

    def grow() -> None:
        buffer.resize_(512, 512)
        buffer.zero_()

    gc.collect()  # what earlier tests left would be let go of in between
    before = live_bytes("cpu")
    _, peak = peak_bytes(grow, "cpu")
    assert peak - before == MB
