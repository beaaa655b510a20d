"""Which roles a configuration has, the processes that they run in, and the sync between policy and engines."""

import random
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from actors.cluster import Cluster
from actors.engine import optimizer_spec
from actors.group import RankGroup, in_thread
from actors.roles import ActorCritic, ActorPolicy, ActorReference, ActorRewardModel, ActorTeacher
from conf.schema import Config
from rollout.agents.player import Agents
from rollout.engines import EngineGroup
from rollout.preflight.launch import Prepared
from rollout.rewards import RewardPool
from rollout.single_turn import Player, SingleTurn
from weightsync.sync import WeightSync

KINDS: dict[str, Any] = {
    "critic": ActorCritic,
    "reference": ActorReference,
    "teacher": ActorTeacher,
    "reward_model": ActorRewardModel,
}


def role_paths(cfg: Config, model_path: str, reference: Path | None = None) -> dict[str, str]:
    """The training roles of a configuration, in the order in which they start, and the model folder of each."""
    paths = {"policy": model_path}
    if cfg.algo.has_critic:
        paths["critic"] = cfg.critic.path or model_path
    if cfg.algo.has_reference and cfg.lora.rank == 0:
        paths["reference"] = str(reference or model_path)
    if cfg.algo.has_teacher:
        paths["teacher"] = str(cfg.teacher.path)
    if cfg.reward_model.path is not None:
        paths["reward_model"] = cfg.reward_model.path
    return paths


def make_groups(cfg: Config, cluster: Cluster, paths: dict[str, str]) -> dict[str, RankGroup]:
    """A group of ranks for each role: beside the policy where `cluster.colocate` says so, else in its own processes."""
    spec, groups = optimizer_spec(cfg.trainer), dict[str, RankGroup]()
    for role, path in paths.items():
        trained = spec if role in ("policy", "critic") else None
        beside = groups["policy"] if role in cfg.cluster.colocate else None
        groups[role] = RankGroup(cfg, cluster, role, path, trained, beside)
    return groups


def start_in_turn(groups: dict[str, RankGroup]) -> Future[None]:
    """Loads all roles: those in processes of their own side by side, those beside the policy after it."""

    def begin() -> None:
        own = [group.start() for group in groups.values() if group.owned]
        own[0].result()
        for group in groups.values():
            if not group.owned:
                group.start().result()
        for ready in own:
            ready.result()

    return in_thread(begin)


def make_player(cfg: Config, prepared: Prepared, stack: ExitStack) -> Player:
    """Who plays an episode: the environment's turns, or one completion and its reward. Closed with `stack`."""
    if prepared.env is not None:
        hosts = prepared.env.hosts(cfg)
        stack.callback(hosts.close)
        player = prepared.env.player(cfg, hosts, prepared.tokenizer)
        if isinstance(player, Agents):
            stack.callback(player.close)
        return player
    scorer = RewardPool(cfg.reward)
    stack.callback(scorer.close)
    return SingleTurn(cfg, scorer, prepared.decode)


def connect_sync(
    cfg: Config, policy: ActorPolicy, engines: EngineGroup, vocabulary: int, say: Callable[[str], None]
) -> WeightSync:
    """Pushes from the policy to the engines, planned and connected; `say` is told of failures that were mended."""
    return WeightSync(
        policy,
        engines.handles,
        probe_row(vocabulary, cfg.sync.probe_tokens, cfg.seed),
        cfg.probe_bound,
        cfg.sync,
        cfg.cluster.start_timeout_s,
        say,
        cfg.sync_patience_s,
    )


def probe_row(vocabulary: int, count: int, seed: int) -> list[int]:
    """The row whose log-probabilities verify each push: `count` random token ids.

    Random, because they depend on every layer; a prompt's beginning may be known by heart under any weights.
    """
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(count)]
