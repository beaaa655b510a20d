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
    """Bytes of one rank: the state that outlives a step, and what a step adds to it.

    `second` is hpz's second partition of the weights, which DeepSpeed lets go of with each update.
    """

    weights: float
    master: float
    moments: float
    gradients: float
    second: float

    @property
    def total(self) -> float:
        return self.weights + self.master + self.moments + self.gradients + self.second


def state_bytes(layout: TrainLayout, elements: Elements, num_moments: int) -> StateBytes:
    """What ZeRO promises (Rajbhandari et al. 2020, figure 1) for the parameters that a rank is responsible for.

    Stage 0 in fp32 keeps no master copy: its weights are the master. Moments and master weights are fp32.
    """
    item = ITEM_BYTES[layout.dtype]
    weights = master = moments = gradients = second = 0.0
    for count, ranks in (
        (elements.whole, layout.ranks // layout.tp),
        (elements.matrices / layout.tp, layout.ranks // layout.tp),
        (elements.experts / layout.ep, layout.ranks // layout.ep),
    ):
        stage = layout.zero_stage
        part = count / ranks
        weights += item * (part if stage == 3 else count)
        second += item * count / layout.hpz if layout.hpz > 1 else 0
        master += 4 * part if stage > 0 else 0
        moments += 4 * num_moments * (part if stage > 0 else count)
        gradients += item * (part if stage >= 2 else count)
    return StateBytes(weights=weights, master=master, moments=moments, gradients=gradients, second=second)


def bytes_between_steps(layout: TrainLayout, elements: Elements, num_moments: int, bucket_elements: int) -> float:
    """What a rank holds while no step runs: the state, and the buffers that DeepSpeed does not let go of.

    At ZeRO-3 these are its part of the gradients and the bucket in which they are reduced, `bucket_elements` or the
    whole model if that is smaller; with an offloaded optimizer also its part of the gradients in fp32, and at ZeRO 1
    and 2 its part of the updated weights.
    """
    state = state_bytes(layout, elements, num_moments)
    kept = 0.0
    if layout.zero_stage == 3:
        whole = elements.whole + elements.matrices + elements.experts
        kept += state.gradients + ITEM_BYTES[layout.dtype] * min(bucket_elements, whole)
    if layout.offload_optimizer:
        kept += state.master + (0 if layout.zero_stage == 3 else state.master / 4 * ITEM_BYTES[layout.dtype])
    return state.weights + state.master + state.moments + kept


def elements_of(shapes: Mapping[str, tuple[int, ...]]) -> Elements:
    """Counts of a folder's tensors, told apart by their names. A tied head must not be among them."""
    counts = {"whole": 0, "matrices": 0, "experts": 0}
    for name, shape in shapes.items():
        kind = "experts" if ".experts." in name else "matrices" if name.endswith("_proj.weight") else "whole"
        counts[kind] += math.prod(shape)
    return Elements(**counts)
