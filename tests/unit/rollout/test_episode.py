"""Episodes over scripted engines: exact ids, rewards on their turns, typed failures, contexts without room."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.choices import Context, Isolation, Rewrite
from conf.schema import NO_REWARD, Config, DataConfig, EnvConfig, RewardConfig, RolloutConfig
from rl.advantages import group_advantages
from rl.batching import collate
from rl.faults import RoleDied
from rl.rewards import row_rewards
from rl.types import Group, Prompt, Sampling, Status, Trajectory
from rollout.chat import ChatBridge
from rollout.environment import Action, EnvironmentFailure, Observation, StepResult, Task
from rollout.episode import Episodes
from rollout.isolation import Hosts
from tests.unit.rollout.agents import CHATML, FORGETFUL, ScriptedLane, chat_tokenizer, encode

TOKENIZER = chat_tokenizer()
WORD = TOKENIZER.convert_tokens_to_ids("high")


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


class Echo:
    """Says back what it is told, gives `reward` for each turn and 10 at the end; "stop" ends it, "boom" raises."""

    opened: ClassVar[list["Echo"]] = []

    def __init__(self, reward: float = 1.0, **extra: Any):
        self.reward_of_turn, self.extra, self.closed, self.turns = reward, extra, 0, 0
        self.opened.append(self)

    def reset(self, task: Task) -> Observation:
        self.task = task
        if self.extra.get("down", 0) >= len(self.opened):
            raise EnvironmentFailure("the service is down")
        return Observation(messages=user(task.data.get("prompt", "go")))

    def step(self, action: Action) -> StepResult:
        self.turns += 1
        if action.text == "boom":
            raise KeyError("a bug")
        reward = {"none": None, "nan": float("nan")}.get(action.text, self.reward_of_turn * self.turns)
        info = {"length": len(action.text), "turns": 77}
        done = action.text == "stop"
        return StepResult(messages=user(f"heard {action.text}"), reward=reward, terminated=done, info=info)  # type: ignore[arg-type]

    def score(self) -> float:
        return 10.0

    def close(self) -> None:
        self.closed += 1


class Odd(Echo):
    """Changes its task, gives a message with a key of the transcript's, and is cancelled where the action says so."""

    def reset(self, task: Task) -> Any:
        task.data["seen"] = task.data.get("seen", 0) + 1
        return [{"role": "user", "content": f"seen {task.data['seen']}", "kind": "action"}]

    def step(self, action: Action) -> Any:
        if action.text == "cancel":
            raise asyncio.CancelledError
        return self.cancel_itself() if action.text == "cancel later" else StepResult(terminated=True)

    async def cancel_itself(self) -> StepResult:
        await asyncio.sleep(0)
        raise asyncio.CancelledError


class NamesNobody(Echo):
    def score(self) -> Any:
        return {"mian": 10.0}


class Duel(Echo):
    """Two agents take turns; the first wins."""

    def reset(self, task: Task) -> Observation:
        return Observation(messages=user("you are X"), agent="X")

    def step(self, action: Action) -> StepResult:
        self.turns += 1
        agent = "O" if self.turns % 2 else "X"
        text = f"you are {agent}" if self.turns == 1 else f"other said {action.text}"
        return StepResult(messages=user(text), agent=agent, terminated=self.turns == 4)

    def score(self) -> Any:
        return {"X": 1.0, "O": -1.0}


def play(
    lane: ScriptedLane, target: str = "Echo", template: str = CHATML, max_tokens: int = 40, **env: Any
) -> Trajectory:
    return asyncio.run(player(target, template, **env).play(lane, task(), Sampling(max_tokens=max_tokens), seed=5))


def task(prompt: str = "go") -> Prompt:
    return Prompt(index=4, token_ids=[], record={"prompt": prompt})


def player(target: str = "Echo", template: str = CHATML, max_model_len: int = 512, **env: Any) -> Episodes:
    Echo.opened.clear()
    path = f"{__name__}.{target}"
    chosen: dict[str, Any] = {"_target_": path, "isolation": Isolation.inline} | env
    cfg = Config(
        env=EnvConfig(**chosen),
        data=DataConfig(from_env=True),
        reward=RewardConfig(_target_=NO_REWARD),
        rollout=RolloutConfig(max_model_len=max_model_len, max_tokens=40),
    )
    hosts = Hosts(path, cfg.env.kwargs, cfg.env.isolation, cfg.env.max_concurrent)
    tokenizer = chat_tokenizer(template)
    return Episodes(cfg, ChatBridge(tokenizer), hosts, tokenizer, "none", ["score"])


def actions(trajectory: Trajectory) -> list[list[int]]:
    """The ids of each run of action tokens, of all rows."""
    runs: list[list[int]] = []
    for row in trajectory.rows:
        acts = [False, *row.action_mask]
        for place, token in enumerate(row.token_ids):
            if acts[place + 1]:
                runs.append([token]) if not acts[place] else runs[-1].append(token)
    return runs


def test_episode_holds_every_prompt_and_turn_id_for_id() -> None:  # B21, trl#6067
    lane = ScriptedLane(TOKENIZER, lambda _ids, call: [WORD, TOKENIZER.eos_token_id] if call < 3 else "stop")
    trajectory = play(lane)
    assert trajectory.status is Status.ok
    assert actions(trajectory) == lane.sampled
    for seen, sampled in zip(lane.seen, lane.sampled, strict=True):
        assert trajectory.token_ids[: len(seen) + len(sampled)] == seen + sampled
    assert trajectory.more == []
    assert (trajectory.metrics["turns"], trajectory.metrics["forks"]) == (4, 0)


def test_ids_that_no_text_would_give_survive_every_turn_with_their_logprobs() -> None:  # B21
    odd = [WORD, TOKENIZER.convert_tokens_to_ids("<|im_start|>"), *encode(TOKENIZER, "high"), WORD]
    assert encode(TOKENIZER, TOKENIZER.decode(odd, skip_special_tokens=True)) != odd
    lane = ScriptedLane(TOKENIZER, lambda _ids, call: [*odd, TOKENIZER.eos_token_id] if call < 3 else "stop")
    trajectory = play(lane)
    assert actions(trajectory) == [[*odd, TOKENIZER.eos_token_id]] * 3 + lane.sampled[3:]
    given = [logprob for logprob, acts in zip(trajectory.logprobs, trajectory.action_mask, strict=True) if acts]
    assert given == [-0.5 - n for ids in lane.sampled for n in range(len(ids))]


def test_failed_episodes_of_a_group_carry_no_loss_and_no_baseline() -> None:  # B33, allenai/open-instruct#1887
    episodes = player(kwargs={"down": 2}, retries=0)  # the first two opened fail in reset
    said = [["stop"], ["stop"], ["a", "b", "boom"], ["stop"], ["", "stop"], *([["a", "stop"]] * 11)]

    async def play_all() -> list[Trajectory]:
        return [
            await episodes.play(ScriptedLane(TOKENIZER, each), task(), Sampling(max_tokens=40), seed=n)
            for n, each in enumerate(said)
        ]

    played = asyncio.run(play_all())
    failed = [n for n, trajectory in enumerate(played) if not trajectory.valid]
    assert failed == [0, 1, 2]
    assert "KeyError: 'a bug'" in played[2].error
    assert all(env.closed for env in Echo.opened) and len(Echo.opened) == 16
    batch = collate([Group(position=0, prompt=task(), trajectories=played, version=0)])
    assert batch.num_rows == 13
    earned = torch.tensor([played[n].total for n in range(3, 16)])
    found = group_advantages(row_rewards(batch), batch.group_index, normalize_std=False)
    torch.testing.assert_close(found, earned - earned.mean())


def test_rewards_of_turns_stand_on_their_last_tokens_and_the_score_is_the_outcome() -> None:
    trajectory = play(ScriptedLane(TOKENIZER, ["a", "bb", "stop"]))
    assert trajectory.token_rewards is not None
    given = {place: reward for place, reward in enumerate(trajectory.token_rewards) if reward}
    ends = [
        n
        for n, (a, b) in enumerate(zip(trajectory.action_mask, [*trajectory.action_mask[1:], False], strict=True))
        if a and not b
    ]
    assert given == dict(zip(ends, [1.0, 2.0, 3.0], strict=True))
    assert (trajectory.reward, trajectory.total, trajectory.metrics["length"]) == (10.0, 16.0, 7 / 3)


def test_turn_that_hits_the_token_limit_is_closed_without_being_trained() -> None:
    lane = ScriptedLane(TOKENIZER, ["abcdefgh", "stop"])
    trajectory = play(lane, max_tokens=5)
    end = len(lane.seen[0]) + 5
    assert trajectory.token_ids[end] == TOKENIZER.eos_token_id
    assert not trajectory.action_mask[end]
    assert not trajectory.truncated


def test_seeds_of_turns_differ_and_repeat_with_the_episode() -> None:
    lanes = [ScriptedLane(TOKENIZER, ["a", "stop"]) for _ in range(2)]
    for lane in lanes:
        play(lane)
    seeds = [[s.seed for s in lane.samplings] for lane in lanes]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2


def test_too_many_turns_end_truncated_with_the_score() -> None:
    trajectory = play(ScriptedLane(TOKENIZER, ["a"] * 9), max_turns=3)
    assert (trajectory.truncated, trajectory.metrics["turns"], trajectory.reward) == (True, 3, 10.0)


def test_context_without_room_ends_truncated() -> None:  # B56
    trajectory = play(ScriptedLane(TOKENIZER, ["abcdefghij"] * 40), context_tokens=160)
    assert trajectory.truncated
    assert trajectory.status is Status.ok
    assert len(trajectory.token_ids) <= 160


@pytest.mark.parametrize(
    ("said", "status", "tries"),
    [("boom", Status.env_failed, 1), ("none", Status.env_bad_value, 1), ("nan", Status.env_bad_value, 1)],
)
def test_failure_of_the_episodes_own_is_kept_and_not_played_again(said: str, status: Status, tries: int) -> None:
    trajectory = play(ScriptedLane(TOKENIZER, ["a", said]))
    assert trajectory.status is status
    assert ("KeyError" in trajectory.error) == (said == "boom")
    assert [e.closed > 0 for e in Echo.opened] == [True] * tries
    assert actions(trajectory)  # what was sampled is there to be looked at


def test_environment_that_is_down_once_is_played_again_with_the_same_task_and_seed() -> None:
    trajectory = play(ScriptedLane(TOKENIZER, ["stop"]), kwargs={"down": 1})
    assert trajectory.status is Status.ok
    assert Echo.opened[0].task == Echo.opened[1].task
    assert [e.closed > 0 for e in Echo.opened] == [True, True]


def test_environment_that_stays_down_leaves_the_episode_out() -> None:
    trajectory = play(ScriptedLane(TOKENIZER, ["stop"]), kwargs={"down": 9})
    assert trajectory.status is Status.env_failed
    assert "the service is down" in trajectory.error
    assert len(Echo.opened) == 2


def test_failures_in_a_row_end_the_run() -> None:
    episodes = player(kwargs={"down": 99}, max_failures=3)
    with pytest.raises(RoleDied, match=r"(?s)failed 3 times in a row \(env\.max_failures\).*service is down"):
        for _ in range(2):
            asyncio.run(episodes.play(ScriptedLane(TOKENIZER, ["stop"]), task(), Sampling(max_tokens=9), 0))


def test_engine_failure_is_played_again_then_left_out() -> None:
    lane = ScriptedLane(TOKENIZER, lambda _ids, _call: RuntimeError("engine gone"))
    trajectory = play(lane)
    assert (trajectory.status, trajectory.error, len(lane.seen)) == (Status.engine_failed, "engine gone", 2)


def test_engine_that_saw_other_ids_is_a_failure_of_its_own() -> None:
    class Liar(ScriptedLane):
        async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Any:
            outcome = await super().generate(prompt_ids, sampling)
            assert outcome.completion is not None
            outcome.completion.prompt_ids[3] += 1
            return outcome

    trajectory = play(Liar(TOKENIZER, ["stop"]))
    assert trajectory.status is Status.tokens_mismatch
    assert "from token 3 on" in trajectory.error


def test_message_may_have_keys_of_the_transcripts_own() -> None:
    trajectory = play(ScriptedLane(TOKENIZER, ["ok"]), "Odd")
    assert [entry["kind"] for entry in trajectory.transcript] == ["message", "action"]


@pytest.mark.parametrize("isolation", [Isolation.inline, Isolation.thread])
@pytest.mark.parametrize("said", ["cancel", "cancel later"])
def test_environment_that_cancels_itself_is_its_own_failure(said: str, isolation: Isolation) -> None:
    trajectory = play(ScriptedLane(TOKENIZER, [said]), "Odd", isolation=isolation)
    assert (trajectory.status, "CancelledError" in trajectory.error) == (Status.env_failed, True)


def test_environment_that_changes_its_task_changes_no_other_episodes() -> None:
    prompt, lane = task(), ScriptedLane(TOKENIZER, ["ok", "ok"])
    for _ in range(2):
        asyncio.run(player("Odd").play(lane, prompt, Sampling(max_tokens=40), 5))
    assert lane.seen[0] == lane.seen[1]
    assert prompt.record == {"prompt": "go"}


def test_score_that_names_none_of_those_who_acted_is_no_reward_of_zero() -> None:
    trajectory = play(ScriptedLane(TOKENIZER, ["stop"]), "NamesNobody")
    assert (trajectory.status, trajectory.error) == (
        Status.env_bad_value,
        "rewards were given for mian, and none for main, who acted",
    )


def test_beginning_without_room_for_a_turn_is_no_reward_of_zero() -> None:
    episodes = player(max_model_len=64)
    trajectory = asyncio.run(episodes.play(ScriptedLane(TOKENIZER, []), task("x" * 90), Sampling(max_tokens=9), 0))
    assert trajectory.status is Status.env_bad_value
    assert "leaves no room for a turn" in trajectory.error


def test_agents_have_conversations_of_their_own_and_their_own_outcomes() -> None:
    lane = ScriptedLane(TOKENIZER, ["x1", "o1", "x2", "o2"])
    trajectory = play(lane, "Duel")
    assert [(row.agent, row.reward) for row in trajectory.rows] == [("X", 1.0), ("O", -1.0)]
    texts = [TOKENIZER.decode(row.token_ids) for row in trajectory.rows]
    assert ("x1" in texts[0], "o1" in texts[0], "x2" in texts[1]) == (True, True, True)
    assert actions(trajectory) == [lane.sampled[n] for n in (0, 2, 1, 3)]


def test_window_leaves_old_turns_out_and_keeps_every_sampled_token_once() -> None:
    lane = ScriptedLane(TOKENIZER, ["abcdefghij"] * 7 + ["stop"])
    trajectory = play(lane, context=Context.window, context_tokens=240, window_turns=2)
    assert len(trajectory.rows) > 1
    assert sorted(actions(trajectory)) == sorted(lane.sampled)
    assert all(len(ids) < 240 for ids in lane.seen)
    assert all(ids[: trajectory.prompt_len] == lane.seen[0] for ids in lane.seen)
    assert trajectory.total == 10.0 + sum(range(1, 9))


def test_compaction_trains_the_summary_and_goes_on_from_it() -> None:
    def say(ids: list[int], _call: int) -> str:
        text = TOKENIZER.decode(ids)
        if "Sum up" in text.rsplit("<|im_start|>user", 1)[1]:
            return "SUMMARY"
        return "stop" if "SUMMARY" in text else "abcdefghij"

    lane = ScriptedLane(TOKENIZER, say)
    trajectory = play(lane, context=Context.compact, summary_tokens=20, max_tokens=20, max_turns=40)
    assert trajectory.status is Status.ok
    assert len(trajectory.rows) == 2
    assert sorted(actions(trajectory)) == sorted(lane.sampled)
    assert "SUMMARY" in TOKENIZER.decode(trajectory.more[0].token_ids[: trajectory.more[0].prompt_len])


@pytest.mark.parametrize("max_turns", range(1, 7))
def test_compaction_makes_no_summary_that_nothing_can_go_on_from(max_turns: int) -> None:
    lane = ScriptedLane(TOKENIZER, ["abcdefghij"] * 9)
    trajectory = play(lane, context=Context.compact, summary_tokens=20, max_tokens=20, max_turns=max_turns)
    assert (trajectory.truncated, trajectory.metrics["turns"]) == (True, max_turns)
    assert "Sum up" not in TOKENIZER.decode(lane.seen[-1])


def test_template_that_strips_thinking_forks_at_each_turn() -> None:
    lane = ScriptedLane(TOKENIZER, ["<think>a</think>b", "<think>c</think>d", "stop"])
    trajectory = play(lane, template=FORGETFUL, on_rewrite=Rewrite.fork)
    assert len(trajectory.rows) == 3
    assert "assistant\nb<|im_end|>" in TOKENIZER.decode(lane.seen[2])
    assert sorted(actions(trajectory)) == sorted(lane.sampled)


def test_long_observation_loses_its_middle_and_says_so() -> None:
    lane = ScriptedLane(TOKENIZER, ["stop"])
    episodes = player(observation_tokens=20)
    asyncio.run(episodes.play(lane, task("start" + "x" * 90 + "end"), Sampling(max_tokens=9), 0))
    text = TOKENIZER.decode(lane.seen[0])
    assert "start" in text
    assert "[78 tokens are left out here]" in text
    assert "end<|im_end|>" in text


spoken = st.lists(st.sampled_from(["a", "high", "boom", "none", "stop", "low er"]), min_size=1, max_size=6)


@settings(max_examples=20)
@given(st.lists(spoken, min_size=1, max_size=4))
def test_batches_of_any_episodes_train_what_was_sampled_and_nothing_else(said: list[Sequence[str]]) -> None:
    lanes = [ScriptedLane(TOKENIZER, [*texts, "stop"]) for texts in said]
    played = [play(lane) for lane in lanes]
    group = Group(
        position=0, prompt=task(), trajectories=[*played, replace(play(ScriptedLane(TOKENIZER, ["stop"])))], version=3
    )
    batch = collate([group])
    valid = [lane for lane, t in zip(lanes, played, strict=True) if t.valid]
    assert batch.num_action_tokens == sum(len(ids) for lane in valid for ids in lane.sampled) + 5
    assert batch.num_rows == len(valid) + 1
    assert bool((batch.rollout_logprobs[~batch.action_mask] == 0).all())
