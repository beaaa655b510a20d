"""Where the tensors of a model folder lie in the parameters of the module that was made of it. Pure.

For most parameters one is the other. But transformers keeps the experts of a layer in one tensor, of which a folder
holds a matrix for each expert, and DeepSpeed's expert parallelism has other names again.
"""

import re
from dataclasses import dataclass

# For each expert, the folder's matrices: the gate, up and down projection. By model_type; others have the first kind.
FOLDER_EXPERTS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
USUAL_EXPERTS = ("mlp", "gate_proj", "up_proj", "down_proj")

Index = tuple[int | slice, ...]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor of the folder: its name and shape, and the index at which it lies in the whole parameter."""

    name: str
    shape: tuple[int, ...]
    index: Index = ()


def pieces_of(name: str, shape: tuple[int, ...], model_type: str) -> list[Piece]:
    """The folder's tensors that the parameter `name` of whole `shape` holds."""
    block, gate, up, down = FOLDER_EXPERTS.get(model_type, USUAL_EXPERTS)
    found = re.fullmatch(r"(.*)\.mlp\.(experts\.(gate_up_proj|down_proj|w1|w2|w3)|router\.gate\.weight)", name)
    if found is None:
        return [Piece(name=name, shape=shape)]
    layer, what = f"{found[1]}.{block}", found[3]
    if what is None:
        return [Piece(name=f"{layer}.gate.weight", shape=shape)]
    count, rows = shape[:2]
    halves = {
        "gate_up_proj": [(gate, slice(0, rows // 2)), (up, slice(rows // 2, rows))],
        "w1": [(gate, slice(None))],
        "w3": [(up, slice(None))],
        "w2": [(down, slice(None))],
        "down_proj": [(down, slice(None))],
    }[what]
    high = rows // len(halves)
    return [
        Piece(name=f"{layer}.experts.{expert}.{part}.weight", shape=(high, *shape[2:]), index=(expert, place))
        for expert in range(count)
        for part, place in halves
    ]
