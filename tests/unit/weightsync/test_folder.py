"""A folder's tensors: what does not fit an engine is named, and groups keep the order."""

from weightsync.folder import differences, in_groups

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (64, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.up_proj.weight": (24, 8),
    "model.norm.weight": (8,),
}


def test_differences_whole_update_has_none() -> None:
    assert differences(SHAPES, SHAPES, frozenset()) == []


def test_differences_name_missing_unknown_and_misshaped_tensors() -> None:
    expected = {name.replace("up_proj", "gate"): shape for name, shape in SHAPES.items()}
    expected |= {"model.norm.weight": (16,)}
    assert differences(SHAPES, expected, frozenset()) == [
        "model.layers.0.mlp.up_proj.weight: the engine's model has no such tensor",
        "model.layers.0.mlp.gate.weight: missing from the update",
        "model.norm.weight: shape (8,) sent, (16,) expected",
    ]


def test_differences_tied_name_may_be_missing_and_another_may_not() -> None:
    expected = SHAPES | {"lm_head.weight": (64, 8)}
    assert differences(SHAPES, expected, frozenset({"lm_head.weight"})) == []
    assert differences(SHAPES, expected, frozenset()) == ["lm_head.weight: missing from the update"]


def test_groups_keep_the_order_and_the_limit() -> None:
    groups = in_groups(SHAPES, 4, 1000)
    assert [name for group in groups for name in group] == list(SHAPES)
    assert [len(group) for group in groups] == [1, 1, 2]  # the first is larger than the limit, and alone
