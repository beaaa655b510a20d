"""Sessions of an endpoint over scripted engines, as a program sees them: over HTTP, on a port of this machine."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from openai import OpenAI

from conf.schema import NO_REWARD, Config, DataConfig, EnvConfig, RewardConfig, RolloutConfig
from rl.types import Sampling
from rollout.agents.session import Session, Speech
from rollout.chat import ChatBridge
from rollout.endpoint import Endpoint
from rollout.engine import Outcome
from rollout.environment import Task
from rollout.played import Played
from tests.unit.rollout.agents import CHATML, Say, ScriptedLane, chat_tokenizer

WAIT_S = 60.0
# Shows tools, and calls as the model writes them.
TOOLING = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def make_config(max_model_len: int = 4096, **env: Any) -> Config:
    settings: dict[str, Any] = {"_target_": "some.Agent", "max_turns": 2000}
    return Config(
        env=EnvConfig(**settings | env),
        data=DataConfig(from_env=True),
        reward=RewardConfig(_target_=NO_REWARD),
        rollout=RolloutConfig(max_model_len=max_model_len, max_tokens=80),
    )


class HeldLane(ScriptedLane):
    """Answers once it is let go, which may be when it has been asked. Its events may be waited for in any thread."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.asked, self.cancelled, self.num_asked = threading.Event(), threading.Event(), 0

    def let_go(self) -> None:
        self.loop.call_soon_threadsafe(self.gate.set)

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Outcome:
        self.num_asked += 1
        self.loop, self.gate = asyncio.get_running_loop(), asyncio.Event()
        self.asked.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return await super().generate(prompt_ids, sampling)


class Desk:
    """An endpoint, and a loop in a thread of its own for the lanes, as that of a pool."""

    def __init__(self, template: str = CHATML, tool_format: str = "hermes", keepalive_s: float = WAIT_S, **env: Any):
        self.tokenizer = chat_tokenizer(template)
        self.cfg = make_config(**env)
        self.speech = Speech(
            cfg=self.cfg, bridge=ChatBridge(self.tokenizer), tokenizer=self.tokenizer, tool_format=tool_format
        )
        self.openai = OpenAI(base_url="http://127.0.0.1", api_key="any", max_retries=0, timeout=WAIT_S)
        self.endpoint = Endpoint(keepalive_s=keepalive_s, max_body_bytes=1 << 20)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def lane(self, say: Any, kind: type[ScriptedLane] = ScriptedLane) -> Any:
        return kind(self.tokenizer, say)

    def open(self, lane: ScriptedLane, abandon_s: float = 0.05, **sampling: Any) -> tuple[Session, str]:
        knobs = Sampling(max_tokens=120, **sampling)
        played = Played(task=Task(index=0, seed=0, data={}))
        session = Session(self.speech, played, lane, self.loop, knobs, seed=5, abandon_s=abandon_s)
        return session, self.run(self.endpoint.open(session))

    def client(self, say: Say | list[str], **options: Any) -> tuple[OpenAI, ScriptedLane, Session]:
        """A client with a session of its own."""
        lane = self.lane(say)
        session, base_url = self.open(lane)
        return self.openai.with_options(base_url=base_url, **options), lane, session

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def close(self) -> None:
        self.openai.close()
        self.endpoint.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()


@contextmanager
def desk(**options: Any) -> Iterator[Desk]:
    made = Desk(**options)
    try:
        yield made
    finally:
        made.close()


def send(base_url: str, body: dict[str, Any]) -> socket.socket:
    """A request that was sent, whose answer nobody has read yet."""
    url, data = urlsplit(base_url), json.dumps(body).encode()
    connection = socket.create_connection((str(url.hostname), int(url.port or 0)), timeout=WAIT_S)
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + data)
    return connection


def receive(connection: socket.socket) -> tuple[int, str]:
    """(status, body) of its answer."""
    with connection, connection.makefile("rb") as stream:
        head, _, body = stream.read().partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()
