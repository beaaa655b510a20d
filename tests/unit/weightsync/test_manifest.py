"""What a push carries: whole blocks, disjoint aligned places, and a clear list of what does not fit."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.manifest import ALIGN_BYTES, ITEM_BYTES, Manifest, aligned, block_of, differences, plan_buckets

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (64, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.up_proj.weight": (24, 8),
    "model.layers.1.self_attn.q_proj.weight": (8, 8),
    "model.layers.1.mlp.up_proj.weight": (24, 8),
    "model.norm.weight": (8,),
}


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3"),
        ("model.layers.13.mlp.experts.7.w1", "model.layers.13"),
        ("lm_head.weight", "lm_head.weight"),
        ("h.0", "h.0"),
    ],
)
def test_block_of_is_the_prefix_up_to_the_first_number(name: str, block: str) -> None:
    assert block_of(name) == block


names = st.builds(
    lambda layer, part: part if layer < 0 else f"model.layers.{layer}.{part}",
    st.integers(-1, 4),
    st.sampled_from(["q", "k", "v", "norm.weight", "experts.0.w"]),
)
all_shapes = st.dictionaries(names, st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=25)


@given(shapes=all_shapes, dtype=st.sampled_from(list(ITEM_BYTES)), bucket_bytes=st.integers(1, 20_000))
def test_plan_any_model_keeps_blocks_whole_and_places_disjoint(
    shapes: dict[str, tuple[int, ...]], dtype: str, bucket_bytes: int
) -> None:
    manifest = plan_buckets(shapes, dtype, bucket_bytes)
    assert sorted(t.name for t in manifest.tensors()) == sorted(shapes)
    homes: dict[str, set[int]] = {}
    for index, bucket in enumerate(manifest.buckets):
        end = 0
        for tensor in bucket.tensors:
            homes.setdefault(block_of(tensor.name), set()).add(index)
            assert tensor.shape == shapes[tensor.name]
            assert tensor.nbytes == math.prod(tensor.shape) * ITEM_BYTES[dtype]
            assert tensor.offset % ALIGN_BYTES == 0
            assert tensor.offset >= end
            end = tensor.offset + tensor.nbytes
        assert end <= bucket.nbytes <= manifest.max_bucket_bytes
        blocks = {block_of(t.name) for t in bucket.tensors}
        assert bucket.nbytes <= bucket_bytes or len(blocks) == 1
    assert all(len(home) == 1 for home in homes.values())
    assert manifest.total_bytes == sum(math.prod(s) * ITEM_BYTES[dtype] for s in shapes.values())
    assert Manifest.from_dict(json.loads(json.dumps(manifest.to_dict()))) == manifest


def test_plan_block_larger_than_a_bucket_is_alone() -> None:
    manifest = plan_buckets(SHAPES, "float32", 1024)
    assert [sorted({block_of(t.name) for t in b.tensors}) for b in manifest.buckets] == [
        ["model.embed_tokens.weight"],
        ["model.layers.0"],
        ["model.layers.1", "model.norm.weight"][:1],
        ["model.norm.weight"],
    ]


def test_plan_scattered_block_is_put_together() -> None:
    manifest = plan_buckets({"l.0.a": (4,), "head": (4,), "l.0.b": (4,)}, "float32", 512)
    assert [[t.name for t in b.tensors] for b in manifest.buckets] == [["l.0.a", "l.0.b"], ["head"]]


def test_fingerprint_changes_with_name_shape_dtype_and_place() -> None:
    base = plan_buckets(SHAPES, "float32", 10_000)
    renamed = {name.replace("q_proj", "qkv"): shape for name, shape in SHAPES.items()}
    reshaped = SHAPES | {"model.norm.weight": (9,)}
    others = [
        plan_buckets(renamed, "float32", 10_000),
        plan_buckets(reshaped, "float32", 10_000),
        plan_buckets(SHAPES, "bfloat16", 10_000),
        plan_buckets(SHAPES, "float32", 1_000),
    ]
    prints = {m.fingerprint() for m in [base, *others]}
    assert len(prints) == 5
    assert plan_buckets(dict(SHAPES), "float32", 10_000).fingerprint() == base.fingerprint()
    assert Manifest.from_dict(json.loads(json.dumps(base.to_dict()))).fingerprint() == base.fingerprint()


def test_differences_whole_update_has_none() -> None:
    assert differences(plan_buckets(SHAPES, "float32", 1000), SHAPES, frozenset()) == []


def test_differences_name_missing_unknown_and_misshaped_tensors() -> None:
    expected = {name.replace("up_proj", "gate"): shape for name, shape in SHAPES.items() if ".0." in name}
    expected |= {name: shape for name, shape in SHAPES.items() if ".0." not in name} | {"model.norm.weight": (16,)}
    problems = differences(plan_buckets(SHAPES, "float32", 1000), expected, frozenset())
    assert problems == [
        "model.layers.0.mlp.up_proj.weight: the engine's model has no such tensor",
        "model.layers.0.mlp.gate.weight: missing from the update",
        "model.norm.weight: shape (8,) sent, (16,) expected",
    ]


def test_differences_tied_name_may_be_missing_and_another_may_not() -> None:
    expected = SHAPES | {"lm_head.weight": (64, 8)}
    manifest = plan_buckets(SHAPES, "float32", 1000)
    assert differences(manifest, expected, frozenset({"lm_head.weight"})) == []
    assert differences(manifest, expected, frozenset()) == ["lm_head.weight: missing from the update"]


@pytest.mark.parametrize(("nbytes", "wanted"), [(0, 0), (1, 256), (256, 256), (257, 512)])
def test_aligned_rounds_up(nbytes: int, wanted: int) -> None:
    assert aligned(nbytes) == wanted
