"""A first environment: sums with a second try after a hint.

python scripts/train.py experiment=quickstart env=examples.my_first_env.Sums num_steps=5
"""

import random
import re
from typing import Any

from rollout.environment import Action, StepResult, Task


class Sums:
    """One object is one episode. The reward is 1 for the right sum, half of that on the second try."""

    @staticmethod
    def make_task(split: str, seed: int, index: int) -> dict[str, Any]:
        draw = random.Random(f"{split}/{seed}/{index}")
        return {"a": draw.randint(0, 9), "b": draw.randint(0, 9)}

    def reset(self, task: Task) -> str:
        self.sum, self.tries = task.data["a"] + task.data["b"], 0
        return f"What is {task.data['a']} + {task.data['b']}? Reply with just the number."

    def step(self, action: Action) -> StepResult:
        self.tries += 1
        numbers = re.findall(r"-?\d+", action.text)
        if numbers and int(numbers[-1]) == self.sum:
            return StepResult(reward=1.0 / self.tries, terminated=True, info={"correct": 1.0})
        hint = "That is no number." if not numbers else "Too low." if int(numbers[-1]) < self.sum else "Too high."
        message = {"role": "user", "content": f"{hint} Reply with just the number."}
        return StepResult(messages=[message], terminated=self.tries == 2, info={"correct": 0.0})

    def close(self) -> None:
        """Nothing to give back."""
