"""A first environment: say a word of a given length, with one more try after a hint.

python scripts/train.py experiment=quickstart env=examples.my_first_env.WordLength num_steps=5
"""

import re
from typing import Any

from rollout.environment import Action, StepResult, Task


class WordLength:
    """One object is one episode. The reward is 1 for a word of the right length, half of it on the second try."""

    @staticmethod
    def make_task(split: str, seed: int, index: int) -> dict[str, Any]:
        return {"letters": 3 + (index + seed) % 5}

    def reset(self, task: Task) -> str:
        self.letters, self.tries = task.data["letters"], 0
        return f"Reply with one English word of exactly {self.letters} letters, and nothing else."

    def step(self, action: Action) -> StepResult:
        self.tries += 1
        word = re.sub(r"[^a-z]", "", action.text.lower())
        if len(word) == self.letters:
            return StepResult(reward=1.0 / self.tries, terminated=True, info={"correct": 1.0})
        hint = f"That has {len(word)} letters. Reply with one word of exactly {self.letters} letters."
        message = {"role": "user", "content": hint}
        return StepResult(messages=[message], terminated=self.tries == 2, info={"correct": 0.0})

    def close(self) -> None:
        """Nothing to give back."""
