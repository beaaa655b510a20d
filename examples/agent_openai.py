"""An agent with a loop of its own, written for any model behind OpenAI's API, and trained as it is:

    python scripts/train.py env=examples.agent_openai.CalculatorAgent model.path=FOLDER env.tool_format=hermes

FOLDER is a model whose chat template shows it the tools.
"""

import json
import random
from typing import Any

from openai import OpenAI

from rollout.environment import Task

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "The product of two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class CalculatorAgent:
    """Reward 1.0 when the last line of the final answer is the result."""

    def __init__(self, largest: int = 99, max_calls: int = 4):
        self.largest, self.max_calls = largest, max_calls

    @staticmethod
    def make_task(split: str, seed: int, index: int, largest: int = 99, **_kwargs: Any) -> dict[str, Any]:
        draw = random.Random(f"{split} {seed} {index}")
        return {"a": draw.randint(2, largest), "b": draw.randint(2, largest)}

    def run(self, task: Task, base_url: str, model: str) -> float:
        a, b = task.data["a"], task.data["b"]
        question = f"What is {a} times {b}? Use the tool, then answer with just the number."
        messages: list[Any] = [{"role": "user", "content": question}]
        with OpenAI(base_url=base_url, api_key="any") as client:
            for _ in range(self.max_calls):
                reply = client.chat.completions.create(model=model, messages=messages, tools=[MULTIPLY])  # type: ignore[list-item]
                said = reply.choices[0].message
                messages.append(said)
                if not said.tool_calls:
                    return float((said.content or "").strip().split("\n")[-1] == str(a * b))
                for call in said.tool_calls:
                    result = multiply(call.function.arguments)  # type: ignore[union-attr]
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return 0.0


def multiply(arguments: str) -> str:
    """What the tool answers."""
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) * int(numbers["b"]))
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {error!r}; give whole numbers a and b"
