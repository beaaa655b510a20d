"""A database in memory of which a model's SQL can read the tables, and nothing else, within limits."""

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# What these compute is bounded by their arguments; those that read files, load code or make large values are not here.
FUNCTIONS = {
    "abs", "avg", "coalesce", "count", "cume_dist", "date", "datetime", "dense_rank", "first_value", "glob",
    "group_concat", "ifnull", "iif", "instr", "julianday", "lag", "last_value", "lead", "length", "like",
    "lower", "ltrim", "max", "min", "nth_value", "ntile", "nullif", "percent_rank", "rank", "round",
    "row_number", "rtrim", "sign", "strftime", "substr", "substring", "sum", "time", "total", "trim",
    "unicode", "upper",
}  # fmt: skip
STEPS_PER_CHECK = 1000


class SqlError(Exception):
    """A statement failed or was stopped. The text is for the model."""


class Rows(NamedTuple):
    columns: list[str]
    rows: list[tuple[Any, ...]]
    complete: bool  # False where there are more rows


class ReadOnlyDatabase:
    """`fill` makes the tables. Each query runs at most `max_steps` instructions of SQLite's machine."""

    def __init__(self, fill: Callable[[sqlite3.Connection], None], tables: Sequence[str], max_steps: int = 1_000_000):
        self.tables, self.max_checks, self.checks = frozenset(tables), max_steps // STEPS_PER_CHECK, 0
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        fill(self.connection)
        for limit, value in (
            (sqlite3.SQLITE_LIMIT_LENGTH, 2_000),
            (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 5_000),
            (sqlite3.SQLITE_LIMIT_COLUMN, 50),
            (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 50),
            (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 20),
            (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
        ):
            self.connection.setlimit(limit, value)
        self.connection.set_authorizer(self._authorize)
        self.connection.set_progress_handler(self._check, STEPS_PER_CHECK)

    def query(self, sql: str, max_rows: int) -> Rows:
        """Runs one SELECT. Raises SqlError."""
        self.checks = 0
        try:
            cursor = self.connection.execute(sql)
            if cursor.description is None:
                raise SqlError("only SELECT is allowed")
            rows = cursor.fetchmany(max_rows + 1)
            columns = [column[0] for column in cursor.description]
            cursor.close()
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            if self.checks > self.max_checks:
                raise SqlError("the query takes too long and was stopped") from None
            raise SqlError(str(error)) from None
        return Rows(columns, rows[:max_rows], len(rows) <= max_rows)

    def close(self) -> None:
        self.connection.close()

    def _authorize(self, action: int, first: str | None, second: str | None, *_: Any) -> int:
        """What SQLite is about to do, while it compiles a statement: everything that is not named here is denied."""
        allowed = (
            action == sqlite3.SQLITE_SELECT
            or (action == sqlite3.SQLITE_READ and first in self.tables)
            or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FUNCTIONS)
        )
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    def _check(self) -> bool:
        self.checks += 1
        return self.checks > self.max_checks
