"""What the ranks of a training layout would hold, from a folder's config.json alone: no process, no DeepSpeed.

The same description that actors.shards reads from a live engine, by the rules that DeepSpeed follows: a test compares
the two in every layout.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.compiled import machine_folder
from actors.engine import matrix_cuts
from actors.lora import add_adapters, base_name
from actors.pieces import pieces_of
from actors.shards import described
from conf.layout import TrainLayout
from conf.schema import LoraConfig
from weightsync.held import Parameter, Share

Shapes = dict[str, tuple[int, ...]]
FUSED = re.compile(r"(.*\.mlp)\.experts\.gate_up_proj")


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model as a layout holds it: its parameters, the folder's tensors by number, and how tensor parallelism cuts.

    `dims` has the dimension along which a parameter is cut, for those that are.
    """

    layout: TrainLayout
    parameters: tuple[Parameter, ...]
    shapes: Shapes
    dims: dict[int, int]

    def shares(self, rank: int) -> list[Share]:
        """What a rank has of each parameter."""
        return [self._share(rank, n, parameter) for n, parameter in enumerate(self.parameters)]

    def _share(self, rank: int, n: int, parameter: Parameter) -> Share:
        """Ranks that share a cut parameter are neighbours; DeepSpeed pads what it partitions to equal sizes."""
        layout = self.layout
        parts = max(layout.tp, layout.ep) if n in self.dims else 1
        replicas, replica = layout.ranks // parts, rank // parts
        cut = {"dim": self.dims.get(n, 0), "part": rank % parts, "parts": parts}
        if layout.zero_stage < 3:
            return Share(**cut, replica=replica, replicas=replicas)
        return Share(**cut, numel=-(-parameter.numel // parts // replicas), partition=replica)


def trained_model(path: str, layout: TrainLayout, lora: LoraConfig) -> TrainedModel:
    """The model of a folder, of which only config.json is read, in a layout that is legal for it.

    Raises whatever transformers does for a config.json that it cannot build.
    """
    lm = built(path)
    if lora.rank > 0:
        import torch

        with torch.device("meta"):
            add_adapters(lm, lora)
    model_type = str(lm.config.model_type)
    found = {base_name(name): tuple(parameter.shape) for name, parameter in lm.named_parameters()}
    cuts = matrix_cuts(lm.config) if layout.tp > 1 else {}
    if layout.ep > 1:
        found = with_spread_experts(found)
    pieces = {name: pieces_of(name, shape, model_type) for name, shape in found.items()}
    shapes = {piece.name: piece.shape for own in pieces.values() for piece in own if ".lora_" not in piece.name}
    numbers = {name: k for k, name in enumerate(shapes)}
    dims = {}
    for n, name in enumerate(found):
        style = next((style for pattern, style in cuts.items() if re.match(pattern, name)), None)
        if layout.ep > 1 and re.search(r"\.mlp\.experts\.w[123]$", name):
            dims[n] = 0
        elif style == "colwise" or (style == "rowwise" and name.endswith(".weight")):
            dims[n] = 0 if style == "colwise" else 1
    return TrainedModel(
        layout=layout,
        parameters=tuple(described(name, shape, pieces[name], numbers) for name, shape in found.items()),
        shapes=shapes,
        dims=dims,
    )


def built(path: str) -> Any:
    """The folder's model in transformers, without memory for its weights."""
    # Building imports torch's compiler, which makes its folder at once: not among temporary files, where it would stay.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(machine_folder() / "inductor"))
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def with_spread_experts(found: Shapes) -> Shapes:
    """The parameters of a model whose blocks of experts DeepSpeed's AutoEP has replaced, in its order and names."""
    blocks = {match[1]: shape for name, shape in found.items() if (match := FUSED.fullmatch(name))}
    out: Shapes = {}
    done = set()
    for name, shape in found.items():
        block = next((b for b in parents(name) if b in blocks), None)
        if block is None:
            out[name] = shape
        elif block not in done:
            done.add(block)
            experts, rows, width = blocks[block]
            out[f"{block}.router.gate.weight"] = found[f"{block}.gate.weight"]
            out[f"{block}.experts.w1"] = (experts, rows // 2, width)
            out[f"{block}.experts.w2"] = found[f"{block}.experts.down_proj"]
            out[f"{block}.experts.w3"] = (experts, rows // 2, width)
            replaced = (f"{block}.gate.", f"{block}.experts.")
            out |= {n: s for n, s in found.items() if n.startswith(f"{block}.") and not n.startswith(replaced)}
    return out


def parents(name: str) -> Sequence[str]:
    """The modules that a parameter is inside of, outermost first."""
    words = name.split(".")
    return [".".join(words[:k]) for k in range(1, len(words))]
