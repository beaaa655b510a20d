"""Sums too long for the head, with a tool that works them out."""

import ast
import operator
import random
import re
from collections.abc import Callable
from typing import Any

from conf.errors import ConfigError
from rollout.environment import Task
from rollout.envs.splits import draw, generator
from rollout.tools import ToolEnv, ToolError, tool

MAX_CHARACTERS, MAX_EXPONENT, MAX_RESULT = 200, 100, 10**30
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
NUMBER = re.compile(r"(?:(?<!\w)-)?[0-9][0-9,]{0,30}(?:\.[0-9]{1,30})?")


class Calculator(ToolEnv):
    """Reward 1.0 when the last number of the final text is the result.

    terms: how many numbers are in the expression; largest: each is from 1 to it.
    """

    def __init__(self, terms: int = 3, largest: int = 99):
        if not 2 <= terms <= 8 or not 2 <= largest <= 9999:
            raise ConfigError(f"env.kwargs.terms={terms} with largest={largest}: terms is 2 to 8, largest 2 to 9999")
        self.terms, self.largest = terms, largest

    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        env = Calculator(**kwargs)
        expression = draw(generator("calculator", split, seed, index), split, env._expression)
        return {"expression": expression, "answer": str(evaluate(expression))}

    def _expression(self, rng: random.Random) -> str:
        text = str(rng.randint(1, self.largest))
        for i in range(1, self.terms):
            sign = rng.choice("+-*")
            if sign == "*" and not text.isdigit() and rng.random() < 0.5:
                text = f"({text})"
            text = f"{text} {sign} {rng.randint(1, self.largest)}"
            if i + 1 < self.terms and rng.random() < 0.25:
                text = f"({text})"
        return text

    def reset(self, task: Task) -> str:
        self.expression, self.result = str(task.data["expression"]), str(task.data["answer"])
        self.asked = False
        return f"What is {self.expression}? Work it out with the tool calculate, then answer with just the number."

    @tool
    def calculate(self, expression: str) -> str:
        """Works out an arithmetic expression.

        expression: numbers, + - * / // % ** and parentheses, such as (3 + 4) * 5
        """
        self.asked = True
        return str(evaluate(expression))

    def answer(self, text: str) -> float:
        found = [number.replace(",", "") for number in NUMBER.findall(text)]
        right = bool(found) and float(found[-1]) == float(self.result)
        self.note(correct=float(right))
        return float(right)

    def oracle(self) -> str:
        return self.result if self.asked else self.call_text("calculate", expression=self.expression)


def evaluate(expression: str) -> int | float:
    """The value of an arithmetic expression, an integer where it is whole. Raises ToolError, and never takes long."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are allowed")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError(f"{expression!r} is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.12g}")
    return value


def _evaluate(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > MAX_EXPONENT:
            raise ToolError(f"the exponent {right} is too large; at most {MAX_EXPONENT} is allowed")
        return _bounded(OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
        raise ToolError("^ is not known; write ** for powers")
    raise ToolError("only numbers, + - * / // % ** and parentheses are known")


def _bounded(value: Any) -> Any:
    if isinstance(value, complex):
        raise ToolError("the result is not a real number")
    if not abs(value) <= MAX_RESULT:
        raise ToolError("the result is too large")
    return value
