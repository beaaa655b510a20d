"""The tools of any MCP server that speaks over its stdin and stdout: a process of its own for each episode."""

import asyncio
import contextlib
import inspect
import json
import math
import shutil
from collections.abc import AsyncIterator
from typing import Any

import anyio

from conf.errors import ConfigError
from conf.imports import check_arguments, describe, import_function
from rollout.adapters.child_process import ended, running
from rollout.adapters.extras import import_extra
from rollout.adapters.foreign_tools import ForeignTools, as_tool
from rollout.environment import Action, EnvironmentFailure, Message, Observation, StepResult, Task
from rollout.processes.reward_worker import as_number
from rollout.tools import ToolError

mcp = import_extra("mcp", "mcp")
mcp_types = import_extra("mcp_types", "mcp")
stdio = import_extra("mcp.client.stdio", "mcp")
SessionMessage = import_extra("mcp.shared.message", "mcp").SessionMessage

TASK_VARIABLE = "TANDEM_TASK"
MAX_TASK_BYTES = 100_000  # the kernel takes 128 KiB for one variable


class Mcp(ForeignTools):
    """Answers with the help of a server's tools. A turn without a call is the answer, and ends the episode with its
    reward: what the function `score` gives for it and the task's record. An episode that ends before has 0.

    command: the server's program and arguments. Its environment holds TANDEM_TASK, JSON with the task's `index`, `seed`
    and `data`, from which a server that has a state must make it.
    score: import path of `function(answer, record, **score_kwargs) -> float`, sync or async, on any scale.
    system: a system prompt for all tasks. env: further variables of the server, which inherits but a few (HOME, PATH).
    call_s: seconds for all calls of one turn; keep it below env.step_s. A call that takes longer is answered so.

    A record has `prompt` (text or messages), may have `system`, and for the oracle `calls` ([{"name", "arguments"}])
    and `answer`. Tasks come from data=file, or from `tasks`: import path of `function(split, seed, index) -> record`.
    """

    def __init__(
        self,
        command: list[str],
        score: str,
        tasks: str = "",
        score_kwargs: dict[str, Any] | None = None,
        system: str = "",
        env: dict[str, str] | None = None,
        call_s: float = 20.0,
    ):
        if not isinstance(command, list) or not command or not all(isinstance(part, str) for part in command):
            raise ConfigError(f"env.kwargs.command={command!r}: must be a list of texts: a program and its arguments")
        if not shutil.which(command[0]):
            raise ConfigError(f"env.kwargs.command={command!r}: no program {command[0]!r} can be found and run")
        if not 0 < call_s < math.inf:
            raise ConfigError(f"env.kwargs.call_s={call_s}: must be > 0")
        self._judge = import_function(score, "env.kwargs.score")
        self._judge_kwargs = dict(score_kwargs or {})
        check_arguments(self._judge, "env.kwargs.score", score, "", {}, **self._judge_kwargs)
        self._command, self._system, self._call_s = list(command), system, call_s
        self._env = {str(name): str(value) for name, value in (env or {}).items()}
        self._client: Any = None
        self._held: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    @staticmethod
    def make_task(split: str, seed: int, index: int, tasks: str = "", **_: Any) -> dict[str, Any]:
        if not tasks:
            raise ConfigError(
                "env.kwargs.tasks='': give the import path of a function(split, seed, index) -> record, or tasks with "
                "data=file data.path=FILE"
            )
        record: dict[str, Any] = import_function(tasks, "env.kwargs.tasks")(split, seed, index)
        return record

    async def reset(self, task: Task) -> Observation:
        """Starts the server. Raises EnvironmentFailure when it does not get ready, and ValueError for a bad record."""
        await self.close()
        self._record, self._calls_made = task.data, 0
        messages = first_messages(task.data, self._system)
        shown = json.dumps({"index": task.index, "seed": task.seed, "data": task.data})
        if len(shown.encode()) > MAX_TASK_BYTES:
            raise ValueError(
                f"the record of task {task.index} is too long for {TASK_VARIABLE}: {len(shown)} characters"
            )
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        # A task of its own: what the client holds must be entered and left in the same one.
        self._held = asyncio.create_task(self._hold(self._opened, {TASK_VARIABLE: shown}))
        self._client = await self._opened
        try:
            tools = await self._list_tools()
        except mcp.MCPError as error:
            raise self._failure(f"does not list its tools: {error}") from error
        return Observation(messages=messages, tools=self.offer(tools))

    async def step(self, action: Action) -> StepResult:
        self._until = asyncio.get_running_loop().time() + self._call_s
        return await super().step(action)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        self._calls_made += 1
        remaining = max(self._until - asyncio.get_running_loop().time(), 0.01)
        try:
            result = await self._client.call_tool(name, arguments, read_timeout_seconds=remaining)
        except mcp.MCPError as error:
            if error.code == mcp_types.REQUEST_TIMEOUT:
                raise ToolError(f"{name} took longer than {self._call_s:g} s") from None
            if error.code == mcp_types.CONNECTION_CLOSED:
                raise self._failure("has ended") from error
            raise ToolError(error.message) from None
        except RuntimeError as error:  # a result that does not fit the schema which the server itself gave
            raise self._failure(f"gave a wrong result of {name}: {error}") from error
        text = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    async def answer(self, text: str) -> float:  # type: ignore[override]
        value = self._judge(text, self._record, **self._judge_kwargs)
        value = await value if inspect.isawaitable(value) else value
        reward = as_number(value)
        if reward is None:
            raise ValueError(f"env.kwargs.score gave {value!r}, not a finite number")
        return reward

    async def close(self) -> None:  # type: ignore[override]
        """Ends the server and its children."""
        held, self._held, self._client = self._held, None, None
        if held:
            self._stop.set()
            if not self._opened.done() or self._opened.cancelled():  # it still waits for the server
                held.cancel()
            await asyncio.wait({held})

    def oracle(self) -> str:
        """The record's calls one after another, then its answer."""
        calls = self._record.get("calls", [])
        if self._calls_made < len(calls):
            call = calls[self._calls_made]
            return self.call_text(call["name"], **call.get("arguments", {}))
        return str(self._record["answer"])

    async def _list_tools(self) -> list[dict[str, Any]]:
        tools, cursor = [], None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools += [as_tool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            if not (cursor := page.next_cursor):
                return tools

    async def _hold(self, opened: asyncio.Future[Any], variables: dict[str, str]) -> None:
        """Keeps the server and the connection to it until `_stop`."""
        env = stdio.get_default_environment() | self._env | variables
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._process = await stack.enter_async_context(running(self._command, env, talks=True))
                client = await stack.enter_async_context(mcp.Client(pipes(self._process)))
                opened.set_result(client)
                await self._stop.wait()
        except Exception as error:
            if not opened.done():
                while isinstance(error, ExceptionGroup):
                    error = error.exceptions[0]
                failure = self._failure(f"did not get ready: {describe(error)}")
                opened.set_exception(failure)

    def _failure(self, what: str) -> EnvironmentFailure:
        code = self._process.returncode if self._process else None
        ended = "" if code is None else f" (exit code {code})"
        return EnvironmentFailure(f"the MCP server {' '.join(self._command)!r} {what}{ended}")


def first_messages(record: dict[str, Any], system: str) -> list[Message]:
    """How the task of a record is put to the model. Raises ValueError for a record without a prompt."""
    prompt = record.get("prompt")
    if not isinstance(prompt, str | list) or not prompt:
        raise ValueError(f"the task needs a `prompt`, text or messages; its keys are {', '.join(record) or 'none'}")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    system = record.get("system") or system
    return [{"role": "system", "content": system}] * bool(system) + messages


@contextlib.asynccontextmanager
async def pipes(process: asyncio.subprocess.Process) -> AsyncIterator[tuple[Any, Any]]:
    """The streams of messages that an MCP client reads from and writes to; a line of JSON is a message."""
    assert process.stdin and process.stdout
    stdin, stdout = process.stdin, process.stdout
    received, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, to_send = anyio.create_memory_object_stream[Any](0)

    async def read() -> None:
        async with received:
            while line := await stdout.readline():
                try:
                    message = SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
                except ValueError as error:  # the client is told, and goes on: some servers print
                    message = error
                await received.send(message)

    async def write() -> None:
        async with to_send:
            async for sent in to_send:
                stdin.write(sent.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await stdin.drain()

    async def quietly(work: Any) -> None:
        """Its end, however it comes, closes the streams, and that is what the client sees."""
        with contextlib.suppress(OSError, ValueError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await work()
        await received.aclose()

    async def watch() -> None:
        await ended(process)
        await asyncio.sleep(0.1)  # for what it said last

    async with anyio.create_task_group() as group:
        for work in (read, write, watch):
            group.start_soon(quietly, work)
        try:
            yield incoming, outgoing
        finally:
            group.cancel_scope.cancel()
            for stream in (received, incoming, outgoing, to_send):
                stream.close()
