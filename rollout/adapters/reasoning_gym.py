"""Questions of reasoning_gym's generators: one turn, scored by the generator itself."""

import contextlib
import functools
import json
import math
import os
import re
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from conf.errors import ConfigError
from conf.imports import nearest
from rollout.adapters.extras import import_extra
from rollout.environment import Action, Observation, StepResult, Task
from rollout.envs.splits import draw, generator
from rollout.tool_calls import without_thinking

NAME = "reasoning_gym"
NONSENSE = "\0"  # whatever credit this gets, any answer gets
SEEDS = 2**31
SCORE_S = 5.0
REFUSED = {"composite": "several generators are env.kwargs.dataset=[ONE,OTHER]"}
# Their questions hang on the order of sets of texts, which is another one in each process.
UNORDERED = ("isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note")
# Where a generator has no answer but an example of one among its metadata.
EXAMPLES = ("example_answer", "example_correct_answer", "possible_answer")


class ReasoningGym:
    """The answer is what stands in the last <TAG>...</TAG> of the turn; a turn without it is worth 0 (info: invalid).

    dataset: the name of a generator, or several, which take turns by the index of the task. config: options of the
    generator; of several, by their names.
    tag: "" takes the whole turn, without its thinking, as the answer.
    full_credit_only: the reward is 1.0 where the generator's score is, else 0.0. Without it, the reward is that score,
    from 0 to 1; many generators then pay for what is no answer (0.95 for "0" as a time, 0.33 for "None" spelt
    backward), which a policy finds soon. Either way, a score that nonsense gets too counts only for the generator's
    own answer.

    Some generators read answers with eval: hence env.isolation=sandbox. One whose reading takes longer than 5 s is
    worth 0. Evaluation has questions that training never has, found by drawing about ten for each task, which takes a
    while at launch with the slow generators (arc_agi, futoshiki, knight_swap, sokoban: up to 0.5 s each).
    """

    def __init__(
        self,
        dataset: str | Sequence[str] = "chain_sum",
        config: dict[str, Any] | None = None,
        tag: str = "answer",
        full_credit_only: bool = True,
    ):
        self.names = [dataset] if isinstance(dataset, str) else list(dataset)
        self.config = {self.names[0]: config or {}} if len(self.names) == 1 else dict(config or {})
        if not re.fullmatch(r"[A-Za-z_]*", tag):
            raise ConfigError(f"env.kwargs.tag={tag!r}: must be letters, or '' to take the whole turn")
        if not self.names:
            raise ConfigError("env.kwargs.dataset=[]: name one of reasoning_gym's generators, such as chain_sum")
        for name in self.config:
            if name not in self.names:
                raise ConfigError(
                    f"env.kwargs.config.{name}: of several generators, config holds options by generator"
                    f"{nearest(name, self.names)}"
                )
        for name in self.names:
            dataset_of(name, self._options(name))
        self.tag, self.full_credit_only = tag, full_credit_only

    @staticmethod
    def make_task(split: str, seed: int, index: int, **kwargs: Any) -> dict[str, Any]:
        """{"dataset", "item"}: the name of the generator, and the number of its question. Raises ConfigError."""
        env = ReasoningGym(**kwargs)
        name = env.names[index % len(env.names)]
        options = env._options(name)
        item = draw(
            generator(NAME, split, seed, index),
            split,
            lambda rng: rng.randrange(SEEDS),
            lambda item: str(entry_of(name, options, item)["question"]),
        )
        return {"dataset": name, "item": item}

    def _options(self, name: str) -> str:
        return json.dumps(self.config.get(name, {}), sort_keys=True)

    def reset(self, task: Task) -> Observation:
        name, item = str(task.data["dataset"]), int(task.data["item"])
        self.source = dataset_of(name, self._options(name))
        self.entry = entry_of(name, self._options(name), item)
        text = str(self.entry["question"])
        if self.tag:
            text += f"\n\nWrite your final answer, and nothing else, between <{self.tag}> and </{self.tag}>."
        return Observation(messages=[{"role": "user", "content": text}])

    def step(self, action: Action) -> StepResult:
        answer = self._extract(without_thinking(action.content))
        if answer is None:
            text = f"There is no answer: it must stand between <{self.tag}> and </{self.tag}>."
            info = {"correct": 0.0, "score": 0.0, "invalid": 1.0}
            return StepResult(messages=[{"role": "user", "content": text}], terminated=True, info=info)
        score = self._score(answer)
        if score <= self._score(NONSENSE) and not same(answer, self._own()):
            score = 0.0
        reward = float(score >= 1.0) if self.full_credit_only else score
        info = {"correct": float(score >= 1.0), "score": score, "invalid": 0.0}
        return StepResult(reward=reward, terminated=True, info=info)

    def close(self) -> None:
        self.entry = {}

    def oracle(self) -> str:
        """Raises ConfigError for the few generators that have no answers (boxnet, rush_hour)."""
        own = self._own()
        if own is None:
            name = self.entry["metadata"].get("source_dataset")
            raise ConfigError(f"env.kwargs.dataset={name}: judges answers and has none, so there are no oracle turns")
        return f"<{self.tag}>{own}</{self.tag}>" if self.tag else own

    def _own(self) -> str | None:
        """An answer of the generator's own that it gives full credit, if it has one."""
        own = self.entry["answer"]
        for key in EXAMPLES:
            own = self.entry["metadata"].get(key) if own is None else own
        return own if own is None or isinstance(own, str) else json.dumps(own)

    def _extract(self, text: str) -> str | None:
        if not self.tag:
            return text.strip() or None
        found = re.findall(rf"<{self.tag}>(.*?)</{self.tag}>", text, re.DOTALL)
        return found[-1].strip() or None if found else None

    def _score(self, answer: str) -> float:
        """From 0 to 1; 0 for what the generator cannot read."""
        try:
            with time_limit(SCORE_S):
                score = float(self.source.score_answer(answer, self.entry))
        except Exception:
            return 0.0
        return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0


def same(answer: str, own: str | None) -> bool:
    return own is not None and answer.strip().lower() == own.strip().lower()


@functools.lru_cache(maxsize=8)
def dataset_of(name: str, options: str, seed: int = 0) -> Any:
    """The package's dataset; options are JSON. Raises ConfigError for an unknown name or options that do not fit."""
    with warnings.catch_warnings(action="ignore"):  # a package that it needs is full of what Python warns of
        import_extra("reasoning_gym", NAME)
    factory = import_extra("reasoning_gym.factory", NAME)
    if name in REFUSED:
        raise ConfigError(f"env.kwargs.dataset={name}: is not taken; {REFUSED[name]}")
    if name in UNORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"env.kwargs.dataset={name}: asks other questions in each process; set PYTHONHASHSEED=0 for all of them, "
            "with env.isolation=process, or take another generator"
        )
    if name not in factory.DATASETS:
        raise ConfigError(f"env.kwargs.dataset={name}: no such generator{nearest(name, list(factory.DATASETS))}")
    given = json.loads(options)
    known = [key for key in factory.DATASETS[name][1].__dataclass_fields__ if key not in ("seed", "size")]
    for key in given:
        if key not in known:
            raise ConfigError(f"env.kwargs.config.{key}={given[key]!r}: {name} has no such option{nearest(key, known)}")
    try:
        return factory.create_dataset(name, **given, seed=seed, size=1)
    except Exception as error:
        raise ConfigError(f"env.kwargs.config={given}: {name} does not take it: {error}") from error


def entry_of(name: str, options: str, item: int) -> dict[str, Any]:
    """Question `item` of the generator: {"question", "answer", "metadata"}."""
    try:
        entry = dataset_of(name, options)[item]
    except IndexError:  # a few make all their questions when they are constructed
        entry = dataset_of.__wrapped__(name, options, item)[0]
    return dict(entry)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError within; in threads other than the main one it cannot, and does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
