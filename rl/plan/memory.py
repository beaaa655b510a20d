"""What a training rank holds, by the layout alone. Pure."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from conf.choices import Dtype, Optimizer
from conf.layout import TrainLayout
from conf.schema import Config, LoraConfig

ITEM_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}
NUM_MOMENTS = {Optimizer.adamw: 2, Optimizer.cpu_adam: 2, Optimizer.sgd: 0}
TRAINED = ("policy", "critic")  # roles with gradients and an optimizer


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

    def __add__(self, other: "StateBytes") -> "StateBytes":
        return StateBytes(**{name: getattr(self, name) + getattr(other, name) for name in vars(self)})

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
    whole model if that is smaller; with an offloaded optimizer also its part of the gradients in fp32 (ZeRO-2 adds
    them up in a second one), and at ZeRO 1 and 2 its part of the updated weights.
    """
    state = state_bytes(layout, elements, num_moments)
    kept = 0.0
    if layout.zero_stage == 3:
        whole = elements.whole + elements.matrices + elements.experts
        kept += state.gradients + ITEM_BYTES[layout.dtype] * min(bucket_elements, whole)
    if layout.offload_optimizer:
        kept += state.master * (2 if layout.zero_stage == 2 else 1)
        kept += 0 if layout.zero_stage == 3 else state.master / 4 * ITEM_BYTES[layout.dtype]
    return state.weights + state.master + state.moments + kept


def promised_bytes(cfg: Config, role: str, shapes: Mapping[str, tuple[int, ...]], device: str) -> StateBytes:
    """What each rank of a role holds on `device`, for a model of these tensors (a tied head must not be among them).

    Adapters count as a part of neither matrices nor experts. A critic's value head, a row, is not counted; of a frozen
    model only weights are there.
    """
    whole = held_bytes(cfg, role, shapes)
    if device == "cpu":
        return whole
    if cfg.trainer.offload_parameters and role in TRAINED:
        whole = dataclasses.replace(whole, weights=0.0)
    return dataclasses.replace(whole, master=0.0, moments=0.0) if cfg.trainer.offload_optimizer else whole


def held_bytes(cfg: Config, role: str, shapes: Mapping[str, tuple[int, ...]]) -> StateBytes:
    """As `promised_bytes`, on the device and on the host together."""
    if role == "critic":
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    layout, elements = cfg.train_layout, elements_of(shapes)
    if role not in TRAINED:
        return dataclasses.replace(state_bytes(layout.frozen(), elements, 0), master=0.0, gradients=0.0)
    if role == "policy" and cfg.lora.rank > 0:
        adapters = Elements(whole=num_adapter_parameters(cfg.lora, shapes))
        frozen = dataclasses.replace(elements, whole=elements.whole + adapters.whole)
        return dataclasses.replace(
            state_bytes(layout, adapters, NUM_MOMENTS[cfg.trainer.optimizer]),
            weights=state_bytes(layout, frozen, 0).weights,
        )
    if cfg.trainer.optimizer is Optimizer.muon:
        others = dataclasses.replace(elements, matrices=0)
        return state_bytes(layout, others, 2) + state_bytes(layout, Elements(whole=0, matrices=elements.matrices), 1)
    return state_bytes(layout, elements, NUM_MOMENTS[cfg.trainer.optimizer])


def num_adapter_parameters(lora: LoraConfig, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Elements of the adapters: two thin matrices for each adapted one."""
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2 and ".layers." in name}
    adapted = [s for name, s in matrices.items() if not lora.targets or name.split(".")[-2] in lora.targets]
    return sum(lora.rank * (rows + columns) for rows, columns in adapted)


def memory_line(layout: str, found: Mapping[str, int], promised: StateBytes) -> str:
    """What a rank was measured to hold, beside what its layout promises, and its peaks; in MB."""
    state = {"weights": (found["parameters_bytes"], promised.weights)}
    if found["optimizer_bytes"]:
        state["optimizer"] = (found["optimizer_bytes"], promised.master + promised.moments)
    parts = [f"{name} {held / 1e6:.1f} MB (promised {wanted / 1e6:.1f})" for name, (held, wanted) in state.items()]
    peaks = [
        f"{name.removesuffix('_peak_bytes')} {count / 1e6:.1f}" for name, count in found.items() if "_peak" in name
    ]
    asleep = [f"asleep {found['asleep_bytes'] / 1e6:.1f} MB"] if found["asleep_bytes"] else []
    return f"{layout}: {', '.join([*parts, *asleep])}; peak in {', '.join(peaks)} MB"


def elements_of(shapes: Mapping[str, tuple[int, ...]]) -> Elements:
    """Counts of a folder's tensors, told apart by their names. A tied head must not be among them."""
    counts = {"whole": 0, "matrices": 0, "experts": 0}
    for name, shape in shapes.items():
        kind = "experts" if ".experts." in name else "matrices" if name.endswith("_proj.weight") else "whole"
        counts[kind] += math.prod(shape)
    return Elements(**counts)
