"""Questions about a database, answered with SQL that must be right on another database of the same tables too."""

import random
import re
from collections import Counter
from functools import partial
from typing import Any

from conf.errors import ConfigError
from rollout.environment import Task
from rollout.envs.read_only import ReadOnlyDatabase, Rows, SqlError
from rollout.envs.shop import SCHEMA, TABLES, Question, ask, fill
from rollout.envs.splits import draw, generator
from rollout.tools import ToolEnv, ToolError, tool

MAX_ANSWER_ROWS = 1000
MAX_DATABASES = 100
FENCED = re.compile(r"```(?:sql)?\s*\n?(.*?)```", re.DOTALL | re.IGNORECASE)


class SqliteQa(ToolEnv):
    """Reward 1.0 for SQL with the right rows, on the database that the model can query and on one that it cannot.

    The SQL is the last fenced block of the final text, or all of it, or what is given to the tool submit. Rows are
    compared in any order unless the question asks for one; columns in their order.
    max_rows, max_characters: what of a result the model gets to read.
    """

    def __init__(self, max_rows: int = 20, max_characters: int = 1500):
        if max_rows < 1 or max_characters < 100:
            raise ConfigError(
                f"env.kwargs.max_rows={max_rows} with max_characters={max_characters}: must be >= 1 and >= 100"
            )
        self.max_rows, self.max_characters = max_rows, max_characters
        self.databases: list[ReadOnlyDatabase] = []

    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        """The two databases have answers, and not the same, so that an answer written as it stands is right on one."""
        SqliteQa(**kwargs)
        rng = generator("sqlite_qa", split, seed, index)
        question = draw(rng, split, ask, lambda question: question.text)
        visible, hidden = _data_for(question, rng)
        return {**question._asdict(), "visible": visible, "hidden": hidden}

    def reset(self, task: Task) -> str:
        self.close()
        data = task.data
        self.sql, self.ordered, self.looked = str(data["sql"]), bool(data["ordered"]), False
        self.databases = [_open(str(data["visible"])), _open(str(data["hidden"]))]
        return (
            f"A SQLite database has these tables:\n{SCHEMA}\n\nQuestion: {data['text']}\n\nLook at the data with the "
            "tool query as often as you need. Then answer with one SELECT statement in a ```sql block: it is run on "
            "this database and on another one with the same tables."
        )

    @tool
    def query(self, sql: str) -> str:
        """Runs a SELECT statement and shows the rows."""
        self.looked = True
        try:
            return self._shown(self.databases[0].query(sql, self.max_rows))
        except SqlError as error:
            raise ToolError(str(error)) from None

    @tool
    def submit(self, sql: str) -> str:
        """Gives a SELECT statement as the final answer, which ends the episode."""
        self.finish(self._grade(sql))
        return "submitted"

    def answer(self, text: str) -> float:
        blocks = FENCED.findall(text)
        return self._grade(blocks[-1] if blocks else text)

    def close(self) -> None:
        for database in self.databases:
            database.close()

    def oracle(self) -> str:
        """Looks first, then answers."""
        if not self.looked:
            return self.call_text("query", sql=self.sql)
        return f"```sql\n{self.sql}\n```"

    def _grade(self, sql: str) -> float:
        try:
            right = all(
                _same(database.query(sql, MAX_ANSWER_ROWS), database.query(self.sql, MAX_ANSWER_ROWS), self.ordered)
                for database in self.databases
            )
        except SqlError:
            right = False
        self.note(correct=float(right))
        return float(right)

    def _shown(self, found: Rows) -> str:
        lines = [" | ".join(found.columns), *(" | ".join(_cell(value) for value in row) for row in found.rows)]
        text = "\n".join(lines)
        if len(text) > self.max_characters:
            return text[: self.max_characters] + "\n... (cut off: the result is too long)"
        if not found.rows:
            return text + "\n(no rows)"
        return text if found.complete else f"{text}\n... (there are more than {self.max_rows} rows)"


def _open(seed: str) -> ReadOnlyDatabase:
    return ReadOnlyDatabase(partial(fill, seed=seed), TABLES)


def _data_for(question: Question, rng: random.Random) -> tuple[str, str]:
    """Seeds of two databases on which the question has answers that differ."""
    first: tuple[str, Rows] | None = None
    for _ in range(MAX_DATABASES):
        seed = f"shop/{rng.getrandbits(40)}"
        database = _open(seed)
        rows = database.query(question.sql, MAX_ANSWER_ROWS)
        database.close()
        if not rows.rows or any(value in (None, 0) for row in rows.rows[:1] for value in row):
            continue
        if first is None:
            first = seed, rows
        elif not _same(rows, first[1], question.ordered):
            return first[0], seed
    raise ValueError(f"{question.text!r}: among {MAX_DATABASES} databases no two have answers that differ")


def _same(one: Rows, other: Rows, ordered: bool) -> bool:
    if not (one.complete and other.complete):
        return False
    left, right = ([tuple(_rounded(value) for value in row) for row in found.rows] for found in (one, other))
    return left == right if ordered else Counter(left) == Counter(right)


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def _cell(value: Any) -> str:
    return "NULL" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)
