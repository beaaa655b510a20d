"""Which prompt comes next: a cursor whose whole state is one number, the prompts drawn since the start of training.

Epochs are seeded permutations, joined without a gap: a batch may span two epochs, nothing is dropped, and each prompt
comes exactly once per epoch. Resuming at a position continues the sequence exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rl.types import Prompt


def epoch_order(epoch: int, num_prompts: int, seed: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """Dataset indices [num_prompts] in the order of that epoch (the first is 0)."""
    if not shuffle:
        return np.arange(num_prompts)
    # Raw words of a bit generator are the same in every numpy version; Generator.permutation promises no such thing.
    words = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(num_prompts)
    return np.argsort(words, kind="stable")


def prompt_at(position: int, num_prompts: int, seed: int, shuffle: bool) -> int:
    """Dataset index of the prompt drawn at `position` (the first is 0). Raises ValueError out of range."""
    epoch, offset = _locate(position, num_prompts)
    return int(epoch_order(epoch, num_prompts, seed, shuffle)[offset])


def _locate(position: int, num_prompts: int) -> tuple[int, int]:
    if num_prompts < 1:
        raise ValueError(f"num_prompts={num_prompts}: there is no prompt to draw")
    if position < 0:
        raise ValueError(f"position={position}: counts prompts drawn, so it is never negative")
    return divmod(position, num_prompts)


@dataclass(kw_only=True)
class PromptStream:
    """The prompts of a run in drawing order. Holds no cursor: `at` is a function of the position alone."""

    prompts: Sequence[Prompt]
    seed: int
    shuffle: bool = True
    _order: tuple[int, npt.NDArray[np.int64]] | None = field(default=None, init=False, repr=False, compare=False)

    def at(self, position: int) -> Prompt:
        """The prompt drawn at `position`. Raises ValueError without prompts or at a negative position."""
        epoch, offset = _locate(position, len(self.prompts))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(epoch, len(self.prompts), self.seed, self.shuffle)
        return self.prompts[int(self._order[1][offset])]

    def epoch(self, position: int) -> int:
        """The epoch (the first is 0) that the prompt at `position` belongs to."""
        return _locate(position, len(self.prompts))[0]
