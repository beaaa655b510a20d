"""An environment behind an OpenEnv server, yours or one that is started for the episode: a session for each episode.

It speaks the server's protocol (JSON over a WebSocket) itself: the package's own client brings web servers and user
interfaces along, and hides by which error a session was refused.
"""

import asyncio
import contextlib
import json
import math
import shutil
import socket
from typing import Any

import aiohttp

from conf.errors import ConfigError
from rollout.adapters.child_process import running
from rollout.adapters.foreign_tools import ForeignTools, as_tool
from rollout.environment import EnvironmentFailure, Observation, StepResult, Task
from rollout.envs.splits import generator
from rollout.processes.reward_worker import as_number
from rollout.tools import ToolError

ACT = "act"
MAX_MESSAGE_BYTES = 16 << 20
RETRY_S = 0.25
# What the server answers to an action that is wrong, or on which its environment raised.
ANSWERED = ("VALIDATION_ERROR", "EXECUTION_ERROR")


class OpenEnv(ForeignTools):
    """Rewards are those of the server's environment, for each turn as it gives them, on its own scale.

    base_url: of a running server, as in http://HOST:PORT. Or command: a program and its arguments that serve on
    {port} of this machine; it is started for each episode, and ended with it.
    field: the field of an action that takes the text of a turn; "" is the only one that must be given, where that is
    text. Where there is none the model acts by a tool, `act`, whose arguments are the fields of an action.
    show: the field of an observation that the model reads; "" is the only text in it, or else all of it as JSON.
    prompt: put before the first observation. queue_s: how long to wait where the server has no session free, or is not
    up yet; keep it below env.reset_s. wait_s: for one answer; keep it below env.step_s.

    A task has a `seed` for the environment's reset, and may have `prompt` and further arguments `reset`. An action that
    the server refuses, or on which the environment raises, is answered with what it says, and counted as invalid.
    """

    def __init__(
        self,
        base_url: str = "",
        command: list[str] | None = None,
        field: str = "",
        show: str = "",
        prompt: str = "",
        queue_s: float = 50.0,
        wait_s: float = 25.0,
    ):
        if bool(base_url) == bool(command):
            raise ConfigError(
                f"env.kwargs.base_url={base_url!r} with command={command}: give one of them, the address of a running "
                "server or the command that starts one"
            )
        if base_url and not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"env.kwargs.base_url={base_url!r}: must begin with http:// or https://")
        if command:
            if not isinstance(command, list) or not any("{port}" in str(part) for part in command):
                raise ConfigError(
                    f"env.kwargs.command={command!r}: must be a list, a program and its arguments, one of which holds "
                    "{port}, the port that it is to serve on"
                )
            if not shutil.which(command[0]):
                raise ConfigError(f"env.kwargs.command={command}: no program {command[0]!r} can be found and run")
        for name, value in (("queue_s", queue_s), ("wait_s", wait_s)):
            if not 0 < value < math.inf:
                raise ConfigError(f"env.kwargs.{name}={value}: must be > 0")
        self._url, self._command = base_url.rstrip("/"), [str(part) for part in command or []]
        self._field, self._show, self._prompt = field, show, prompt
        self._queue_s, self._wait_s = queue_s, wait_s
        self._held: contextlib.AsyncExitStack | None = None
        self._process: asyncio.subprocess.Process | None = None

    @staticmethod
    def make_task(split: str, seed: int, index: int, **_: Any) -> dict[str, Any]:
        """Seeds of evaluation are odd, those of training even."""
        return {"seed": 2 * generator("openenv", split, seed, index).getrandbits(30) + (split == "eval")}

    async def reset(self, task: Task) -> Observation:
        """Raises EnvironmentFailure when there is no server, or no session in time."""
        await self.close()
        self._held = contextlib.AsyncExitStack()
        url, until = self._url, asyncio.get_running_loop().time() + self._queue_s
        if self._command:
            url = f"http://127.0.0.1:{(port := free_port())}"
            command = [part.replace("{port}", str(port)) for part in self._command]
            self._process = await self._held.enter_async_context(running(command, talks=False))
        self._client = await self._held.enter_async_context(aiohttp.ClientSession())
        seed = {"seed": int(task.data.get("seed", task.seed)) % 2**31}
        first = await self._begin(url, seed | task.data.get("reset", {}), until)
        tools = self._read_schema(await self._schema(url))
        text = "\n\n".join(filter(None, [task.data.get("prompt", self._prompt), self._observed(first)]))
        return Observation(messages=[{"role": "user", "content": text}], tools=self.offer(tools))

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        answer = await self._ask("step", arguments)
        if answer["type"] == "error":
            raise ToolError(said(answer))
        result = self._took(answer)
        if result.terminated:
            self.finish()
        self.reward(result.reward)
        return str(result.messages[0]["content"])

    async def answer(self, text: str) -> StepResult:  # type: ignore[override]
        if not self._field:
            usage = f"Nothing was done: act by calling the tool {ACT}."
            return StepResult(messages=[{"role": "user", "content": usage}], info={"invalid": 1.0})
        answer = await self._ask("step", {self._field: text})
        if answer["type"] == "error":
            messages = [{"role": "user", "content": f"Error: {said(answer)}"}]
            return StepResult(messages=messages, info={"invalid": 1.0})
        return self._took(answer)

    async def close(self) -> None:  # type: ignore[override]
        held, self._held = self._held, None
        if held:
            await held.aclose()

    def _took(self, answer: dict[str, Any]) -> StepResult:
        data = answer["data"]
        reward = 0.0 if data.get("reward") is None else as_number(data["reward"])
        if reward is None:
            raise ValueError(f"the OpenEnv server gave the reward {data['reward']!r}, not a finite number")
        messages = [{"role": "user", "content": self._observed(data)}]
        return StepResult(messages=messages, reward=reward, terminated=bool(data.get("done")))

    def _observed(self, data: dict[str, Any]) -> str:
        observation = data.get("observation") or {}
        if self._show:
            if self._show not in observation:
                raise ValueError(f"env.kwargs.show={self._show}: an observation has {', '.join(observation) or 'none'}")
            value = observation[self._show]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(observation) == len(texts) == 1 else json.dumps(observation, ensure_ascii=False)

    def _read_schema(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """The tools, and the field that takes a turn's text where there are none."""
        fields = {name: kind for name, kind in schema.get("properties", {}).items() if name != "metadata"}
        needed = [name for name in schema.get("required", []) if name in fields]
        if self._field and self._field not in fields:
            raise ValueError(f"env.kwargs.field={self._field}: an action has {', '.join(fields) or 'no fields'}")
        if not self._field and len(needed) == 1 and fields[needed[0]].get("type") == "string":
            self._field = needed[0]
        if self._field:
            return []
        parameters = {key: value for key, value in schema.items() if key in ("$defs", "required")}
        return [as_tool(ACT, schema.get("description", "Acts."), parameters | {"properties": fields})]

    async def _schema(self, url: str) -> dict[str, Any]:
        try:
            async with self._client.get(f"{url}/schema", timeout=aiohttp.ClientTimeout(self._wait_s)) as found:
                found.raise_for_status()
                action: dict[str, Any] = (await found.json())["action"]
                return action
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            raise EnvironmentFailure(f"the OpenEnv server does not say what an action is: {error!r}") from error

    async def _begin(self, url: str, arguments: dict[str, Any], until: float) -> dict[str, Any]:
        """The first observation of a new session. Waits in line."""
        why = ""
        while True:
            try:
                self._socket = await self._client.ws_connect(f"{url}/ws", max_msg_size=MAX_MESSAGE_BYTES)
                answer = await self._ask("reset", arguments)
                if answer["type"] != "error":
                    assert self._held
                    self._held.push_async_callback(self._leave, self._socket)
                    return dict(answer["data"])
                await self._socket.close()
                why = said(answer)
                if answer["data"].get("code") != "CAPACITY_REACHED":
                    raise EnvironmentFailure(f"the OpenEnv server began no episode: {why}")
            except aiohttp.ClientError as error:
                why = repr(error)
            if self._process and self._process.returncode is not None:
                raise EnvironmentFailure(f"the OpenEnv server ended with code {self._process.returncode}")
            if asyncio.get_running_loop().time() + RETRY_S > until:
                raise EnvironmentFailure(f"no session of the OpenEnv server within {self._queue_s:g} s: {why}")
            await asyncio.sleep(RETRY_S)

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """What the server answers. Raises EnvironmentFailure when it does not, or cannot go on."""
        try:
            await self._socket.send_json({"type": kind, "data": data})
            answer = json.loads(await self._socket.receive_str(timeout=self._wait_s))
        except (TypeError, ValueError, ConnectionError, TimeoutError) as error:
            raise EnvironmentFailure(f"the OpenEnv server did not answer {kind}: {error!r}") from error
        if kind == "step" and answer["type"] == "error" and answer["data"].get("code") not in ANSWERED:
            raise EnvironmentFailure(f"the OpenEnv server cannot go on: {said(answer)}")
        return dict(answer)

    async def _leave(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            await connection.send_json({"type": "close"})
        await connection.close()


def said(answer: dict[str, Any]) -> str:
    """What an error of the server says, with what was wrong in which field."""
    data = answer["data"]
    wrong = [f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg', '')}" for e in data.get("errors", [])]
    return "; ".join([str(data.get("message", "unknown error")), *wrong])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
