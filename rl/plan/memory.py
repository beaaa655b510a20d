"""What a training rank holds, by the layout alone. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from conf.choices import Dtype
from conf.layout import TrainLayout

ITEM_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}


@dataclass(frozen=True, kw_only=True)
class Elements:
    """Parameters of a model by how a layout may cut them: `whole` on every rank, `matrices` by tp, `experts` by ep."""

    whole: int
    matrices: int = 0
    experts: int = 0


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of one rank between two optimizer steps, and of the gradients that a backward pass adds."""

    weights: float
    master: float
    moments: float
    gradients: float

    @property
    def between_steps(self) -> float:
        return self.weights + self.master + self.moments

    @property
    def total(self) -> float:
        return self.weights + self.master + self.moments + self.gradients


def state_bytes(layout: TrainLayout, elements: Elements, num_moments: int) -> StateBytes:
    """What ZeRO promises (Rajbhandari et al. 2020, figure 1) for the parameters that a rank is responsible for.

    Stage 0 in fp32 keeps no master copy: its weights are the master. Moments and master weights are fp32.
    """
    item = ITEM_BYTES[layout.dtype]
    weights = master = moments = gradients = 0.0
    for count, ranks in (
        (elements.whole, layout.ranks // layout.tp),
        (elements.matrices / layout.tp, layout.ranks // layout.tp),
        (elements.experts / layout.ep, layout.ranks // layout.ep),
    ):
        stage = layout.zero_stage
        part = count / ranks
        weights += item * (part if stage == 3 else count) + (item * count / layout.hpz if layout.hpz > 1 else 0)
        master += 4 * part if stage > 0 else 0
        moments += 4 * num_moments * (part if stage > 0 else count)
        gradients += item * (part if stage >= 2 else count)
    return StateBytes(weights=weights, master=master, moments=moments, gradients=gradients)


def elements_of(shapes: Mapping[str, tuple[int, ...]]) -> Elements:
    """Counts of a folder's tensors, told apart by their names. A tied head must not be among them."""
    counts = {"whole": 0, "matrices": 0, "experts": 0}
    for name, shape in shapes.items():
        kind = "experts" if ".experts." in name else "matrices" if name.endswith("_proj.weight") else "whole"
        counts[kind] += math.prod(shape)
    return Elements(**counts)
