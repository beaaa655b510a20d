"""What the measurements of agents share: figures, engines that answer at once, players without a run around them."""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from conf.choices import Isolation
from conf.schema import NO_REWARD, Config, DataConfig, EnvConfig, RewardConfig, RolloutConfig
from rl.types import Completion, Prompt, Sampling
from rollout.chat import ChatBridge
from rollout.engine import Outcome
from rollout.episode import Episodes
from rollout.isolation import Hosts
from scripts.benchmarks import agents_envs


class Figure(NamedTuple):
    """One measured number."""

    name: str
    value: float
    unit: str


class InstantLane:
    """An engine that answers each turn at once with what `say(turn)` gives, or fails where that is None; `seconds` is
    what it has taken itself.

    The ids of a prompt come back as other objects of equal value, as from another process.
    """

    def __init__(self, say: Callable[[int], list[int] | None]):
        self.say, self.turn, self.seconds = say, 0, 0.0

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Outcome:
        began = time.perf_counter()
        ids = self.say(self.turn)
        if ids is None:
            return Outcome(request_id="instant", error="the engine is gone")
        cut, ids = len(ids) > sampling.max_tokens, ids[: sampling.max_tokens]
        completion = Completion(
            prompt_ids=copied(prompt_ids),
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            finish_reason="length" if cut else "stop",
            versions=[0] * len(ids),
            ttft_s=0.0,
            decode_s=0.0,
        )
        self.turn += 1
        self.seconds += time.perf_counter() - began
        return Outcome(request_id="instant", completion=completion)


def copied(ids: Sequence[int]) -> list[int]:
    """The same ids as new objects."""
    return array("i", ids).tolist()


def environment_path(name: str) -> str:
    return f"{agents_envs.__name__}.{name}"


def agent_config(
    name: str, isolation: Isolation, *, max_model_len: int, max_tokens: int, kwargs: dict[str, Any], **env: Any
) -> Config:
    """A configuration for one of the benchmarks' environments; `kwargs` are the environment's, `env` of EnvConfig."""
    return Config(
        env=EnvConfig(_target_=environment_path(name), isolation=isolation, kwargs=kwargs, **env),
        data=DataConfig(from_env=True),
        reward=RewardConfig(_target_=NO_REWARD),
        rollout=RolloutConfig(max_model_len=max_model_len, max_tokens=max_tokens),
    )


@contextmanager
def opened_hosts(cfg: Config) -> Iterator[Hosts]:
    """The places where the environments of a configuration run; closed at the end."""
    hosts = Hosts(str(cfg.env._target_), cfg.env.kwargs, cfg.env.isolation, cfg.env.max_concurrent)
    try:
        yield hosts
    finally:
        hosts.close()


def make_episodes(cfg: Config, hosts: Hosts, tokenizer: Any) -> Episodes:
    """The player of one of the benchmarks' environments, which all have `score`."""
    tool_format = "hermes" if cfg.env.tool_format == "auto" else cfg.env.tool_format
    return Episodes(cfg, ChatBridge(tokenizer), hosts, tokenizer, tool_format, ["score"])


def make_prompt(index: int, **record: Any) -> Prompt:
    return Prompt(index=index, token_ids=[], record=record)
