"""The configuration schema: every key, its type, its default (here and nowhere else) and its meaning.

YAML groups and experiments hold only differences from this file. `docs/config.md` is generated from it
(`python -m conf.document`). Cross-field rules live in `__post_init__`; each quotes the fields and their values.
"""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

import math
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

from conf.choices import (
    Advantage,
    Aggregation,
    Channel,
    Context,
    Correction,
    Device,
    Dtype,
    Isolation,
    KlEstimator,
    KlPlace,
    Layout,
    Optimizer,
    PolicyLoss,
    Quantization,
    Recompute,
    Rewrite,
    Schedule,
    Template,
    Truncated,
)
from conf.errors import ConfigError
from conf.layout import TrainLayout

NO_REWARD = "rollout.tasks.nothing.reward"  # of conf/reward/none.yaml


def option(default: Any, help: str) -> Any:
    """A dataclass field with a default and the sentence that documents it (mutable defaults are copied)."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def require_range(
    section: str,
    key: str,
    value: float,
    low: float,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raises ConfigError unless low <= value <= high (low < value when `open_low`, value < high when `open_high`).

    NaN and infinity are refused.
    """
    above = value > low if open_low else value >= low
    inside = math.isfinite(value) and above and (value < high if open_high else value <= high)
    bound = f"{'>' if open_low else '>='} {low:g}"
    bound += "" if high == math.inf else f" and {'<' if open_high else '<='} {high:g}"
    finite = "" if math.isfinite(value) else "finite and "
    require(inside, f"{section}{key}={value}: must be {finite}{bound}")


@dataclass(kw_only=True)
class AlgoConfig:
    name: str = option("grpo", "label of the algorithm in logs")
    advantage: Advantage = option(
        Advantage.group,
        "group (against the group's mean), rloo (against the other members' mean), remax (against the greedy answer), "
        "reinforce_pp (returns), reinforce_pp_baseline (group mean, to be whitened), turns (the return from each turn "
        "on against the other members' mean), gae (a critic), teacher (distill)",
    )
    normalize_std: bool = option(
        True, "divide group advantages by the group's sample standard deviation (GRPO); false is Dr.GRPO's"
    )
    whiten: bool = option(False, "then shift and scale advantages to mean 0 and variance 1 over the batch's tokens")
    gamma: float = option(1.0, "discount of a later action token (gae, reinforce_pp) or turn (turns)")
    gae_lambda: float = option(1.0, "decay of later temporal differences (gae)")
    bootstrap_truncated: bool = option(
        False, "count on the critic's value after the last token of a truncated row (gae); false takes it as an end"
    )
    loss: PolicyLoss = option(
        PolicyLoss.clip,
        "clip (PPO), gspo, gmpo, cispo, sapo, reinforce, decoupled (PPO around the policy at the start of the step), "
        "divergence (reverse KL to the teacher's distribution)",
    )
    clip_low: float = option(0.2, "the ratio is clipped from below at 1 - clip_low (gmpo: its log at -clip_low)")
    clip_high: float = option(0.2, "the ratio is clipped from above at 1 + clip_high (gmpo: its log at clip_high)")
    dual_clip: float = option(0.0, "bound of the loss of negative advantages, as a ratio above 1 (clip); 0 is off")
    sapo_tau_positive: float = option(1.0, "steepness of SAPO's gate for positive advantages")
    sapo_tau_negative: float = option(1.05, "steepness of SAPO's gate for the others")
    aggregation: Aggregation = option(
        Aggregation.token_mean,
        "token_mean, sequence_mean (mean over rows of their token means) or sequence_sum (mean of token sums over a "
        "constant), all by global counts",
    )
    aggregation_tokens: int = option(0, "the constant of sequence_sum; 0 takes rollout.max_tokens")
    kl_coef: float = option(0.0, "weight of the KL to the reference policy; 0 starts no reference actor")
    kl_in: KlPlace = option(KlPlace.loss, "loss (a term of it), or reward (each action token is charged its log-ratio)")
    kl_estimator: KlEstimator = option(
        KlEstimator.k2,
        "in the loss: k1, k2, k3, or k3_ratio (k3 times the ratio); only k2 and k3_ratio have the gradient of "
        "KL(policy, reference)",
    )
    kl_target: float = option(0.0, "steer kl_coef towards this KL per token, in nats; 0 keeps it fixed")
    kl_horizon: int = option(10000, "trajectories in which a KL of 20 % above the target raises kl_coef by 20 %")
    reference_refresh: int = option(0, "steps after which the reference becomes a copy of the policy; 0 is never")
    entropy_coef: float = option(0.0, "weight of the entropy bonus")
    correction: Correction = option(
        Correction.none,
        "weights exp(trainer - engine): truncate (at correction_high), band (0 outside [low, high]), or whole tokens "
        "and rows kept or masked: mask_token, mask_sequence (product), mask_geometric (geometric mean)",
    )
    correction_low: float = option(0.5, "lower bound of a weight that is kept")
    correction_high: float = option(2.0, "upper bound of a weight that is kept, or the one it is cut to (truncate)")
    staleness_decay: float = option(1.0, "a row sampled by weights n versions old counts this to the power of n")
    dynamic_sampling: bool = option(False, "replace groups whose rewards do not differ (DAPO)")
    max_draws: int = option(3, "most groups drawn for one step, in batches; after that the batch is filled as it is")
    curriculum_low: float | None = option(
        None, "prompts with a lower rolling mean reward are left out; null leaves none out"
    )
    curriculum_high: float | None = option(
        None, "prompts with a higher rolling mean reward are left out; null leaves none out"
    )
    overlong_buffer_tokens: int = option(
        0, "the last tokens before rollout.max_tokens in which a completion is charged for its length (DAPO); 0 is off"
    )
    overlong_penalty: float = option(1.0, "charge of a completion of full length")
    truncated: Truncated = option(
        Truncated.keep,
        "a completion that hits the token limit: keep, mask (out of the loss; its reward stays in the group's "
        "statistics) or punish (its reward becomes truncated_reward)",
    )
    truncated_reward: float = option(0.0, "reward of a truncated completion under truncated=punish")
    num_epochs: int = option(1, "passes over the rollout batch in one step")
    num_mini_batches: int = option(
        1, "optimizer steps in one pass; prompts are dealt out whole, so samples of a prompt stay together"
    )

    def __post_init__(self) -> None:
        require_range("algo.", "gamma", self.gamma, 0, 1)
        require_range("algo.", "gae_lambda", self.gae_lambda, 0, 1)
        require_range("algo.", "clip_low", self.clip_low, 0, 1, open_low=True)
        require_range("algo.", "clip_high", self.clip_high, 0, open_low=True)
        require(
            self.dual_clip == 0 or 1 < self.dual_clip < math.inf,
            f"algo.dual_clip={self.dual_clip}: must be finite and above 1 (the paper uses 3), or 0 to turn it off",
        )
        for key in ("sapo_tau_positive", "sapo_tau_negative", "correction_high"):
            require_range("algo.", key, getattr(self, key), 0, open_low=True)
        for key in ("aggregation_tokens", "kl_coef", "kl_target", "reference_refresh", "entropy_coef"):
            require_range("algo.", key, getattr(self, key), 0)
        require_range("algo.", "kl_horizon", self.kl_horizon, 1)
        require_range("algo.", "correction_low", self.correction_low, 0, self.correction_high)
        require_range("algo.", "staleness_decay", self.staleness_decay, 0, 1, open_low=True)
        require_range("algo.", "max_draws", self.max_draws, 1)
        require_range("algo.", "overlong_buffer_tokens", self.overlong_buffer_tokens, 0)
        require_range("algo.", "overlong_penalty", self.overlong_penalty, 0)
        require_range("algo.", "num_epochs", self.num_epochs, 1)
        require_range("algo.", "num_mini_batches", self.num_mini_batches, 1)
        require(math.isfinite(self.truncated_reward), f"algo.truncated_reward={self.truncated_reward}: must be finite")
        low, high = self.curriculum_low, self.curriculum_high
        for key, bound in (("curriculum_low", low), ("curriculum_high", high)):
            require(bound is None or math.isfinite(bound), f"algo.{key}={bound}: must be finite, or null for no bound")
        require(
            low is None or high is None or low < high,
            f"algo.curriculum_low={self.curriculum_low} with algo.curriculum_high={self.curriculum_high}: "
            "no prompt would be left; low must be below high",
        )
        require(
            self.kl_target == 0 or self.kl_coef > 0,
            f"algo.kl_target={self.kl_target} with algo.kl_coef={self.kl_coef}: the controller scales kl_coef; "
            "give it a start above 0",
        )
        require(
            self.reference_refresh == 0 or self.kl_coef > 0,
            f"algo.reference_refresh={self.reference_refresh} with algo.kl_coef={self.kl_coef}: "
            "there is no reference to refresh; set algo.kl_coef above 0",
        )
        by_token = (Advantage.gae, Advantage.reinforce_pp, Advantage.turns, Advantage.teacher)
        require(
            not (self.loss is PolicyLoss.gmpo and self.advantage in by_token),
            f"algo.loss={self.loss.value} with algo.advantage={self.advantage.value}: this loss takes one advantage "
            "for a row, but that estimator gives one for each token; use loss=clip",
        )
        require(
            not (self.loss is PolicyLoss.decoupled and self.correction is not Correction.none),
            f"algo.loss=decoupled with algo.correction={self.correction.value}: both weigh by trainer / engine; "
            "use one of them",
        )
        require(
            self.dual_clip == 0 or self.loss is PolicyLoss.clip,
            f"algo.dual_clip={self.dual_clip} with algo.loss={self.loss.value}: only loss=clip has a dual clip",
        )
        compares = (Advantage.group, Advantage.rloo, Advantage.reinforce_pp_baseline)
        require(
            not self.dynamic_sampling or self.advantage in compares,
            f"algo.dynamic_sampling=true with algo.advantage={self.advantage.value}: this estimator learns from groups "
            "of equal rewards too; only estimators that compare a group's members may replace them",
        )
        require(
            not (self.has_teacher and self.kl_coef > 0 and self.kl_in is KlPlace.reward),
            "algo.kl_in=reward with algo.advantage=teacher: distillation has no reward to charge; use algo.kl_in=loss",
        )
        extra = self.overlong_buffer_tokens > 0 or self.truncated is Truncated.punish
        require(
            not (self.advantage is Advantage.remax and extra),
            f"algo.advantage=remax with algo.overlong_buffer_tokens={self.overlong_buffer_tokens}, algo.truncated="
            f"{self.truncated.value}: the greedy answer is not charged for its length; the comparison would be unfair",
        )
        require(
            (self.loss is PolicyLoss.divergence) <= (self.advantage is Advantage.teacher),
            f"algo.loss=divergence with algo.advantage={self.advantage.value}: the divergence is one from a teacher; "
            "use algo=distill",
        )

    @property
    def has_critic(self) -> bool:
        return self.advantage is Advantage.gae

    @property
    def has_teacher(self) -> bool:
        return self.advantage is Advantage.teacher

    @property
    def has_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def has_divergence(self) -> bool:
        return self.loss is PolicyLoss.divergence

    @property
    def has_curriculum(self) -> bool:
        return self.curriculum_low is not None or self.curriculum_high is not None

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps of the policy in one step."""
        return self.num_epochs * self.num_mini_batches


@dataclass(kw_only=True)
class CriticConfig:
    """The critic of algo.advantage=gae: a value head on a model of its own."""

    path: str | None = option(None, "Hugging Face folder of the body; null starts from the policy's")
    lr: float = option(1e-5, "peak learning rate; its schedule and the rest of its optimizer are the trainer's")
    warmup_steps: int = option(0, "first steps in which only the critic is trained")
    value_clip: float = option(0.0, "values may move this far from their old ones in a step before clipping; 0 is off")

    def __post_init__(self) -> None:
        require_range("critic.", "lr", self.lr, 0)
        require_range("critic.", "warmup_steps", self.warmup_steps, 0)
        require_range("critic.", "value_clip", self.value_clip, 0)


@dataclass(kw_only=True)
class TeacherConfig:
    """The teacher of algo.advantage=teacher: a model with the policy's tokenizer."""

    path: str | None = option(None, "Hugging Face folder of the teacher")
    top_k: int = option(
        64, "tokens of its distribution that algo.loss=divergence compares; the rest is one more outcome. 0 takes all"
    )

    def __post_init__(self) -> None:
        require_range("teacher.", "top_k", self.top_k, 0)


@dataclass(kw_only=True)
class RewardModelConfig:
    """A sequence-classification model whose score is added to the reward."""

    path: str | None = option(None, "Hugging Face folder with one label and the policy's tokenizer; null is none")
    weight: float = option(1.0, "factor of its score in the reward")

    def __post_init__(self) -> None:
        require(math.isfinite(self.weight), f"reward_model.weight={self.weight}: must be finite")


@dataclass(kw_only=True)
class ModelConfig:
    path: str = option("models/smollm2", "Hugging Face model folder (config.json, safetensors, tokenizer)")
    attention: str = option(
        "sdpa", "attention implementation of the training side (transformers name: sdpa, eager, flash_attention_2)"
    )

    def __post_init__(self) -> None:
        require(bool(self.path), "model.path='': must name a Hugging Face folder; write model.path=FOLDER")


@dataclass(kw_only=True)
class DataConfig:
    _target_: str | None = option(
        None, "import path of a generator `f(split, seed, size, **kwargs) -> list[dict]`; null reads `path`"
    )
    path: str | None = option(None, "prompts: a .jsonl, .json or .parquet file, or a folder saved by `datasets`")
    eval_path: str | None = option(
        None, "held-out prompts, in the same formats; null holds out the last `eval_size` rows of `path`"
    )
    from_env: bool = option(False, "tasks that the environment makes itself, `size` of them (`make_task`)")
    prompt_key: str = option("prompt", "column with the prompt: a string, or a list of chat messages")
    template: Template = option(
        Template.chat, "chat: render with the tokenizer's chat template; plain: encode the text as it is"
    )
    system_prompt: str | None = option(
        None, "system message put before a string prompt (chat template only); null adds none"
    )
    size: int = option(4096, "training prompts that a generator is asked for")
    eval_size: int = option(64, "held-out prompts for evaluation")
    shuffle: bool = option(True, "a new seeded order in each epoch; false keeps the file's order")
    drop_overlong: bool = option(
        False, "leave out (and count) prompts longer than the room for them; false refuses to start"
    )
    kwargs: dict[str, Any] = option({}, "further arguments of the generator")

    def __post_init__(self) -> None:
        require(
            [bool(self._target_), bool(self.path), self.from_env].count(True) == 1,
            f"data._target_={self._target_ or 'null'} with data.path={self.path or 'null'}, data.from_env="
            f"{str(self.from_env).lower()}: exactly one says where prompts come from; write data=file data.path=FILE, "
            "choose a generator, or with an environment data=env",
        )
        require_range("data.", "size", self.size, 1)
        require_range("data.", "eval_size", self.eval_size, 0)


@dataclass(kw_only=True)
class RewardConfig:
    _target_: str = option(
        "rollout.tasks.arithmetic.reward",
        "import path of `f(completion: str, record: dict, **kwargs) -> float` (or async def)",
    )
    deadline_s: float = option(10.0, "seconds one call may take; its process is killed then and the sample is left out")
    num_workers: int = option(1, "processes that run the reward function")
    shuffle: bool = option(
        False, "control experiment: rewards of a step are permuted over its samples, so nothing can be learnt"
    )
    kwargs: dict[str, Any] = option({}, "further arguments of the reward function")
    weights: dict[str, float] = option(
        {}, "for a function that returns {name: reward}: the weight of each; the reward is their weighted sum"
    )
    separate: bool = option(
        False,
        "each named reward has its own group statistics before they are summed (algo.advantage=group)",
    )

    def __post_init__(self) -> None:
        require(
            not self.separate or len(self.weights) > 1,
            f"reward.separate=true with reward.weights={dict(self.weights)}: name at least two rewards",
        )
        for name, weight in self.weights.items():
            require(math.isfinite(weight), f"reward.weights.{name}={weight}: must be finite")
        require(
            bool(self._target_),
            "reward._target_='': must name a function; write reward._target_=PACKAGE.MODULE.FUNCTION",
        )
        require_range("reward.", "deadline_s", self.deadline_s, 0, open_low=True)
        require_range("reward.", "num_workers", self.num_workers, 1)


@dataclass(kw_only=True)
class EnvConfig:
    """The environment of multi-turn episodes; without one, each prompt is answered once and scored by reward.*."""

    _target_: str | None = option(
        None,
        "import path of the class of an environment (rollout.environment.Environment), or of an agent that brings its "
        "own loop (rollout.environment.Agent); null is none",
    )
    kwargs: dict[str, Any] = option({}, "arguments of the class")
    isolation: Isolation = option(
        Isolation.process,
        "where its code runs: inline (on the event loop: quick code that is trusted), thread, process (killed when it "
        "hangs), or sandbox (a process without network and files)",
    )
    max_concurrent: int = option(64, "episodes at a time; each has a process of its own where isolation says so")
    max_turns: int = option(16, "turns of the policy in one episode; after that it ends truncated")
    tool_format: str = option(
        "auto",
        "how the model writes tool calls: hermes, llama, xml, none, vllm:NAME (vLLM's parser of that name), or auto "
        "(by the chat template)",
    )
    on_rewrite: Rewrite = option(
        Rewrite.refuse,
        "chat templates that change a turn once it is history, as by stripping its thinking: refuse, keep (turns stay "
        "as they were sampled) or fork (rendered anew after each turn, a row of its own)",
    )
    context: Context = option(
        Context.stop,
        "when the next turn has no room: stop (the episode ends truncated), window (the oldest turns are left out, the "
        "beginning stays) or compact (the model sums the conversation up, and goes on from there)",
    )
    context_tokens: int = option(0, "longest conversation before that happens; 0 takes rollout.max_model_len")
    window_turns: int = option(4, "with context=window, the newest turns that stay")
    summary_tokens: int = option(128, "with context=compact, most tokens of a summary")
    observation_tokens: int = option(0, "longest message of the environment; its middle is cut out. 0 is no limit")
    reset_s: float = option(60.0, "seconds that the environment may take for its start")
    step_s: float = option(30.0, "seconds that one step may take")
    score_s: float = option(60.0, "seconds that scoring an episode may take")
    close_s: float = option(10.0, "seconds that closing it may take")
    episode_s: float = option(1800.0, "seconds that a whole episode may take")
    retries: int = option(1, "times that an episode is played again whose environment or engine has failed")
    max_failures: int = option(32, "failures of the environment in a row, of any episodes, after which the run ends")

    def __post_init__(self) -> None:
        for key in ("max_concurrent", "max_turns", "window_turns", "summary_tokens", "max_failures"):
            require_range("env.", key, getattr(self, key), 1)
        for key in ("context_tokens", "observation_tokens", "retries"):
            require_range("env.", key, getattr(self, key), 0)
        for key in ("reset_s", "step_s", "score_s", "close_s", "episode_s"):
            require_range("env.", key, getattr(self, key), 0, open_low=True)
        known = ("auto", "hermes", "llama", "xml", "none")
        require(
            self.tool_format in known or self.tool_format.startswith("vllm:"),
            f"env.tool_format={self.tool_format}: must be one of {', '.join(known)}, or vllm:NAME",
        )
        require(self._target_ != "", "env._target_='': give PACKAGE.MODULE.CLASS, or null for none")


@dataclass(kw_only=True)
class TrainerConfig:
    zero_stage: int = option(1, "DeepSpeed ZeRO stage: 0, 1, 2 or 3")
    sp: int = option(1, "sequence parallel: ranks that share each row (Ulysses; trainer.layout=padded)")
    tp: int = option(1, "tensor parallel: ranks that share each matrix (ZeRO 0, 1 or 2)")
    ep: int = option(1, "expert parallel: ranks that share the experts of each layer (mixture-of-experts models)")
    hpz: int = option(1, "ZeRO-3: ranks of a second partition, from which the backward pass gathers (ZeRO++)")
    offload_optimizer: bool = option(False, "keep master weights and moments in host memory (ZeRO 1, 2 or 3)")
    offload_parameters: bool = option(False, "keep live weights in host memory too (ZeRO-3)")
    recompute: Recompute = option(
        Recompute.none,
        "none, selective (all but matrix products and attention) or full (each layer): activations that the backward "
        "pass computes again instead of keeping them (not with layout=shared_prefix)",
    )
    dtype: Dtype = option(Dtype.float32, "dtype of live weights and of the forward; the master copy is fp32")
    optimizer: Optimizer = option(
        Optimizer.adamw,
        "adamw, sgd, muon (on the matrices of the decoder layers, adamw on the rest; ZeRO-0, tp=1), or cpu_adam (adamw "
        "as DeepSpeed writes it for host memory: compiled at its first use; with offload_optimizer, or on a CPU)",
    )
    lr: float = option(1e-5, "peak learning rate")
    schedule: Schedule = option(
        Schedule.constant, "constant, linear (to zero) or cosine (to zero), counted in optimizer steps"
    )
    warmup_ratio: float = option(
        0.0, "share of all optimizer steps in which the learning rate rises linearly from zero"
    )
    beta1: float = option(0.9, "AdamW first-moment decay")
    beta2: float = option(0.999, "AdamW second-moment decay")
    eps: float = option(1e-8, "AdamW epsilon")
    momentum: float = option(0.95, "momentum of Muon")
    weight_decay: float = option(0.0, "decoupled weight decay")
    grad_clip: float = option(1.0, "largest global gradient norm; 0 turns clipping off")
    layout: Layout = option(
        Layout.shared_prefix,
        "padded, packed (rows one behind another, for attention kernels that take variable lengths) or shared_prefix "
        "(the prompt of a group runs once); all give the same numbers",
    )
    micro_batch_tokens: int = option(8192, "most tokens, padding included, in one forward of one rank")
    logprob_chunk_tokens: int = option(256, "tokens whose [tokens, vocabulary] logits exist at a time")
    fused_logprobs: bool = option(
        False,
        "log-probabilities, entropies and their gradient in one kernel each, compiled at first use, instead of several "
        "passes over the logits (GPUs)",
    )
    num_threads: int = option(0, "CPU threads of one rank; 0 divides the machine's cores among the ranks")
    replay_routing: bool = option(
        False,
        "mixture of experts: updates send each token to the experts that it took when the batch was scored (needs "
        "several optimizer steps a batch, layout=padded or packed, no recomputation)",
    )
    timeout_s: float = option(
        1800.0, "longest wait for one call to the training ranks, or for another process to compile, seconds"
    )

    def __post_init__(self) -> None:
        if self.replay_routing:
            require(
                self.layout is not Layout.shared_prefix and self.sp == 1 and self.recompute is Recompute.none,
                f"trainer.replay_routing=true with trainer.layout={self.layout.value}, trainer.sp={self.sp}, "
                f"trainer.recompute={self.recompute.value}: routes are recorded and replayed for whole rows, in one "
                "forward; use trainer.layout=padded, trainer.sp=1 and trainer.recompute=none",
            )
        require(
            self.recompute is Recompute.none or self.layout is not Layout.shared_prefix,
            f"trainer.recompute={self.recompute.value} with trainer.layout=shared_prefix: "
            "the shared prompt lives in a key/value cache, which recomputation forbids; use trainer.layout=padded",
        )
        require(
            self.sp == 1 or self.layout is Layout.padded,
            f"trainer.sp={self.sp} with trainer.layout={self.layout.value}: only whole rows can be shared out; "
            "use trainer.layout=padded",
        )
        require(
            self.optimizer is not Optimizer.muon or (self.zero_stage == 0 and self.tp == 1),
            f"trainer.optimizer=muon with trainer.zero_stage={self.zero_stage}, trainer.tp={self.tp}: it needs whole "
            "matrices on each rank; use trainer.zero_stage=0 and trainer.tp=1",
        )
        require_range("trainer.", "momentum", self.momentum, 0, 1)
        require_range("trainer.", "lr", self.lr, 0)
        require_range("trainer.", "warmup_ratio", self.warmup_ratio, 0, 1)
        require_range("trainer.", "beta1", self.beta1, 0, 1, open_high=True)
        require_range("trainer.", "beta2", self.beta2, 0, 1, open_high=True)
        require_range("trainer.", "eps", self.eps, 0, open_low=True)
        require_range("trainer.", "weight_decay", self.weight_decay, 0)
        require_range("trainer.", "grad_clip", self.grad_clip, 0)
        require_range("trainer.", "micro_batch_tokens", self.micro_batch_tokens, 1)
        require_range("trainer.", "logprob_chunk_tokens", self.logprob_chunk_tokens, 1)
        require_range("trainer.", "num_threads", self.num_threads, 0)
        require_range("trainer.", "timeout_s", self.timeout_s, 0, open_low=True)


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters on the policy; the rest of it stays as it was, and is the reference."""

    rank: int = option(0, "rank of the adapters; 0 trains the whole model")
    alpha: int = option(32, "the adapters' product is scaled by alpha / rank")
    targets: list[str] = option(
        [], "matrices with an adapter, by the last part of their name (q_proj, ...); [] is all but the head"
    )

    def __post_init__(self) -> None:
        require_range("lora.", "rank", self.rank, 0)
        require_range("lora.", "alpha", self.alpha, 1)
        require(
            self.rank > 0 or not self.targets,
            f"lora.targets={list(self.targets)} with lora.rank=0: there are no adapters; give lora.rank, or leave "
            "lora.targets out",
        )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(kw_only=True)
class RolloutConfig:
    max_tokens: int = option(16, "most tokens sampled for one completion")
    temperature: float = option(1.0, "sampling temperature; the trainer scores at the same")
    max_model_len: int = option(512, "longest prompt + completion in tokens")
    dtype: Dtype = option(Dtype.float32, "dtype of the engine's weights and activations")
    quantization: Quantization = option(
        Quantization.none,
        "none, fp8 (linear layers) or int8 (experts), on GPUs: an engine rounds weights that it loads or is pushed; "
        "needs dtype=bfloat16",
    )
    tp: list[int] = option([1], "tensor-parallel size: one number for all engines, or one for each")
    pp: list[int] = option([1], "pipeline stages: one number for all engines, or one for each")
    ep: bool = option(
        False, "expert parallel: an engine's tensor-parallel members have whole experts each, not a slice of every one"
    )
    max_num_seqs: int = option(128, "sequences an engine decodes at once")
    kv_cache_bytes: int = option(512 << 20, "key/value cache of an engine on the CPU, bytes")
    gpu_memory_utilization: float = option(0.5, "share of a GPU's memory an engine may take")
    prefix_caching: bool = option(True, "reuse keys/values of common prompt prefixes (cleared at each push)")
    num_threads: int = option(0, "CPU threads of one engine; 0 divides the machine's cores among the engines")
    deadline_s: float = option(
        600.0, "seconds from sending a request to its completion; after that it is aborted and left out"
    )
    mismatch_limit: float = option(
        0.0, "largest mean |engine - trainer| log-probability in a step; 0 chooses 1e-3 (float32) or 0.1 (bfloat16)"
    )

    def __post_init__(self) -> None:
        require_range("rollout.", "max_tokens", self.max_tokens, 1)
        require_range("rollout.", "temperature", self.temperature, 0, open_low=True)
        require_range("rollout.", "max_model_len", self.max_model_len, 2)
        require(
            self.quantization is Quantization.none or self.dtype is Dtype.bfloat16,
            f"rollout.quantization={self.quantization.value} with rollout.dtype={self.dtype.value}: vLLM rounds from "
            "bfloat16; use rollout.dtype=bfloat16",
        )
        require(
            self.max_tokens < self.max_model_len,
            f"rollout.max_tokens={self.max_tokens} with rollout.max_model_len={self.max_model_len}: "
            "no room is left for a prompt",
        )
        for key, sizes in (("tp", self.tp), ("pp", self.pp)):
            require(
                bool(sizes) and all(size >= 1 for size in sizes),
                f"rollout.{key}={list(sizes)}: must be a list of sizes >= 1, like [1] or [1,2]",
            )
        require(
            not self.ep or max(self.tp) > 1,
            f"rollout.ep=true with rollout.tp={list(self.tp)}: nobody is there to share the experts with; use a size "
            "above 1",
        )
        require_range("rollout.", "max_num_seqs", self.max_num_seqs, 1)
        require_range("rollout.", "kv_cache_bytes", self.kv_cache_bytes, 1 << 20)
        require_range("rollout.", "gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, open_low=True)
        require_range("rollout.", "num_threads", self.num_threads, 0)
        require_range("rollout.", "deadline_s", self.deadline_s, 0, open_low=True)
        require_range("rollout.", "mismatch_limit", self.mismatch_limit, 0)

    @property
    def mismatch_bound(self) -> float:
        """The limit in force: `mismatch_limit`, or the default of the dtype."""
        return self.mismatch_limit or (1e-3 if self.dtype is Dtype.float32 else 0.1)


@dataclass(kw_only=True)
class SyncConfig:
    bucket_bytes: int = option(
        64 << 20, "memory for a push on each training rank, for two buckets: one is packed while the other is read"
    )
    channel: Channel = option(
        Channel.shm,
        "shm (memory of one host), ipc (memory of the GPU that ranks and engines share), collective (broadcasts, from "
        "host to host) or disk (a folder that all hosts share)",
    )
    folder: str | None = option(None, "with channel=disk, where versions are written; hosts must share it")
    plan: str | None = option(
        None, "folder of a plan that scripts/plan_sync.py --save has made for these layouts; null plans at launch"
    )
    delta: bool = option(False, "send only the engine's modules in which a bit has changed since they were last sent")
    full_every: int = option(10, "with delta, one push in so many is whole all the same")
    snapshot: bool = option(
        False,
        "ranks copy their weights (two versions, in host memory), and with max_lag above 0 train on while engines load",
    )
    one_by_one: bool = option(False, "update the engines one after another, while the others go on sampling")
    probe_tokens: int = option(8, "length of the row whose log-probabilities are compared after each push")
    probe_limit: float = option(
        0.0, "largest |engine - trainer| on the probe row; 0 chooses 1e-3 (float32) or 0.5 (bfloat16)"
    )
    timeout_s: float = option(300.0, "longest wait for one phase of a push, seconds")

    def __post_init__(self) -> None:
        require_range("sync.", "bucket_bytes", self.bucket_bytes, 1 << 16)
        disk = self.channel is Channel.disk
        require(
            disk == bool(self.folder),
            "sync.channel=disk without sync.folder: write sync.folder=FOLDER, one that all hosts share"
            if disk
            else f"sync.folder={self.folder} with sync.channel={self.channel.value}: only sync.channel=disk writes "
            "there; use sync.channel=disk, or leave sync.folder out",
        )
        require(
            not (disk and self.plan is not None),
            f"sync.plan={self.plan} with sync.channel=disk: a saved plan is for links between ranks and engines, which "
            "a folder has none of; use sync.plan=null",
        )
        require(
            not (self.snapshot and self.one_by_one),
            "sync.snapshot=true with sync.one_by_one=true: engines that still sample with the version before would "
            "exceed max_lag; use one of the two",
        )
        require_range("sync.", "full_every", self.full_every, 1)
        require(
            self.full_every > 1 or not self.delta,
            f"sync.delta=true with sync.full_every={self.full_every}: every push would be whole; use at least 2",
        )
        require(
            not (self.one_by_one and self.channel is Channel.collective),
            "sync.one_by_one=true with sync.channel=collective: a broadcast reaches all engines at once; use "
            "sync.channel=shm",
        )
        require_range("sync.", "probe_tokens", self.probe_tokens, 2)
        require_range("sync.", "probe_limit", self.probe_limit, 0)
        require_range("sync.", "timeout_s", self.timeout_s, 0, open_low=True)

    @property
    def slot_bytes(self) -> int:
        """Memory for one bucket."""
        return self.bucket_bytes // 2


@dataclass(kw_only=True)
class ClusterConfig:
    address: str | None = option(
        None, "address of a running Ray cluster; null starts one for this run and stops it afterwards"
    )
    device: Device = option(Device.auto, "cpu, cuda, or auto (cuda where PyTorch sees one)")
    train_ranks: int = option(1, "processes of the training group")
    rollout_engines: int = option(1, "vLLM engines")
    cpus_per_rank: float = option(
        0.0, "CPUs reserved in Ray by a training rank; 0 shares the cores, as phases alternate"
    )
    cpus_per_engine: float = option(0.0, "CPUs reserved in Ray by an engine")
    gpus_per_rank: float = option(1.0, "GPUs of a training rank (cuda only)")
    gpus_per_engine: float = option(1.0, "GPUs of an engine for each tensor-parallel member (cuda only)")
    colocate: list[str] = option(
        [], "training roles that live in the policy's processes: any of critic, reference, teacher, reward_model"
    )
    sleep: bool = option(
        False,
        "roles of one process take turns with its device's memory, and all ranks with all engines; what sleeps waits "
        "in host memory (cuda) or files (cpu); needs max_lag=0",
    )
    start_timeout_s: float = option(600.0, "longest wait for an actor to load its model, seconds")

    def __post_init__(self) -> None:
        require_range("cluster.", "train_ranks", self.train_ranks, 1)
        require_range("cluster.", "rollout_engines", self.rollout_engines, 1)
        for key in ("cpus_per_rank", "cpus_per_engine", "gpus_per_rank", "gpus_per_engine"):
            require_range("cluster.", key, getattr(self, key), 0)
        require_range("cluster.", "start_timeout_s", self.start_timeout_s, 0, open_low=True)
        beside = ("critic", "reference", "teacher", "reward_model")
        require(
            set(self.colocate) <= set(beside) and len(set(self.colocate)) == len(self.colocate),
            f"cluster.colocate={list(self.colocate)}: the roles are {', '.join(beside)}, each at most once",
        )


@dataclass(kw_only=True)
class EvaluationConfig:
    every: int = option(
        0, "evaluate after every n-th step, and before the first and after the last; 0 turns evaluation off"
    )
    samples: int = option(4, "sampled completions for each held-out prompt")
    temperature: float = option(1.0, "temperature of the sampled completions")
    greedy: bool = option(True, "also one completion at temperature 0")
    seed: int = option(1234, "seed of the sampled completions: the same in every evaluation")

    def __post_init__(self) -> None:
        require_range("evaluation.", "every", self.every, 0)
        require_range("evaluation.", "samples", self.samples, 1)
        require_range("evaluation.", "seed", self.seed, 0, 2**31 - 1)
        require_range("evaluation.", "temperature", self.temperature, 0, open_low=True)


@dataclass(kw_only=True)
class CheckpointConfig:
    every: int = option(0, "save after every n-th step; 0 saves only at the end")
    at_end: bool = option(True, "save when the run ends normally")
    keep: int = option(2, "newest checkpoints that stay on disk; 0 keeps all")
    force: bool = option(False, "resume although the configuration differs in what is learnt")
    export: bool = option(True, "write the final policy as a Hugging Face folder, `<run folder>/hf`")

    def __post_init__(self) -> None:
        require_range("checkpoint.", "every", self.every, 0)
        require_range("checkpoint.", "keep", self.keep, 0)


@dataclass(kw_only=True)
class TrackingConfig:
    wandb: bool = option(True, "log to W&B; offline when there is no key or WANDB_MODE says so")
    offline: bool = option(False, "keep W&B offline even where there is a key")
    tensorboard: bool = option(False, "log to TensorBoard files in the run folder")
    project: str = option("tandem", "W&B project")
    samples_per_step: int = option(4, "rollouts written to rollouts.jsonl in each step")
    live: bool = option(True, "live table on a terminal; plain lines otherwise")

    def __post_init__(self) -> None:
        require_range("tracking.", "samples_per_step", self.samples_per_step, 0)


@dataclass(kw_only=True)
class SftConfig:
    """Supervised warm start (scripts/sft.py, and train.py when `num_steps` > 0) on `record["completion"]`."""

    num_steps: int = option(0, "optimizer steps of the warm start; 0 starts from the model as it is")
    batch_size: int = option(128, "demonstrations in one step")
    lr: float = option(2e-3, "peak learning rate of the warm start")
    warmup_steps: int = option(50, "steps in which the learning rate rises linearly")
    final_lr_ratio: float = option(0.1, "the learning rate falls linearly to this share of its peak")
    weight_decay: float = option(0.01, "AdamW weight decay of the warm start")
    beta2: float = option(0.98, "AdamW second-moment decay of the warm start")
    grad_clip: float = option(1.0, "largest global gradient norm")
    kwargs: dict[str, Any] = option({}, "further arguments of the data generator for demonstrations (split 'sft')")

    def __post_init__(self) -> None:
        require_range("sft.", "num_steps", self.num_steps, 0)
        require_range("sft.", "batch_size", self.batch_size, 1)
        require_range("sft.", "lr", self.lr, 0, open_low=True)
        require_range("sft.", "warmup_steps", self.warmup_steps, 0)
        require_range("sft.", "final_lr_ratio", self.final_lr_ratio, 0, 1)
        require_range("sft.", "beta2", self.beta2, 0, 1, open_high=True)
        require_range("sft.", "weight_decay", self.weight_decay, 0)
        require_range("sft.", "grad_clip", self.grad_clip, 0)


@dataclass(kw_only=True)
class Config:
    name: str = option("run", "name of the run: part of its folder's name")
    seed: int = option(0, "seed of prompt order, sampling and initialisation")
    num_steps: int = option(12, "steps: rollout, update, weight sync")
    prompts_per_step: int = option(8, "prompts (groups) in one step")
    samples_per_prompt: int = option(8, "trajectories in a group")
    max_lag: int = option(0, "weight versions that rollouts may run ahead; 0 is synchronous training")
    run_dir: str | None = option(
        None,
        "run folder; null makes `runs/<date>-<name>`, or continues the newest of that name "
        "when resume=auto finds it unfinished",
    )
    resume: str = option(
        "auto",
        "auto (the newest run of this name and meaning, when its newest checkpoint is before num_steps), never, "
        "or the path of a checkpoint",
    )
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(_target_="rollout.tasks.arithmetic.generate"))
    reward: RewardConfig = field(default_factory=RewardConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    sft: SftConfig = field(default_factory=SftConfig)

    def __post_init__(self) -> None:
        require_range("", "num_steps", self.num_steps, 1)
        require_range("", "prompts_per_step", self.prompts_per_step, 1)
        require_range("", "samples_per_prompt", self.samples_per_prompt, 1)
        require_range("", "max_lag", self.max_lag, 0)
        require(
            self.max_lag == 0 or not self.cluster.sleep,
            f"cluster.sleep=true with max_lag={self.max_lag}: engines that sample while ranks train cannot sleep; "
            "use max_lag=0",
        )
        require(
            not self.cluster.sleep or not self.sync.snapshot,
            "cluster.sleep=true with sync.snapshot=true: ranks that sleep in turn do not train while engines load",
        )
        require(self.run_dir != "", "run_dir='': give a folder, or null for runs/<date>-<name>")
        require(bool(self.resume), "resume='': must be auto, never or the path of a checkpoint")
        require_range("", "seed", self.seed, 0, 2**31 - 1)
        require(
            self.name.replace("-", "").replace("_", "").replace(".", "").isalnum(),
            f"name={self.name!r}: use letters, digits, '-', '_' and '.' (it becomes part of a folder's name)",
        )
        compares = (Advantage.group, Advantage.rloo, Advantage.reinforce_pp_baseline, Advantage.turns)
        require(
            self.samples_per_prompt >= 2 or self.algo.advantage not in compares,
            f"samples_per_prompt={self.samples_per_prompt} with algo.advantage={self.algo.advantage.value}: "
            "group advantages compare samples of one prompt; use at least 2",
        )
        require(
            self.samples_per_prompt >= 2 or not self.algo.dynamic_sampling,
            f"samples_per_prompt={self.samples_per_prompt} with algo.dynamic_sampling=true: "
            "a group of one never has signal, so every one would be replaced; use at least 2",
        )
        self._check_roles()
        self._check_env()
        require(
            self.prompts_per_step % self.algo.num_mini_batches == 0,
            f"prompts_per_step={self.prompts_per_step} with algo.num_mini_batches={self.algo.num_mini_batches}: "
            "must divide evenly",
        )
        rows = self.prompts_per_step * self.samples_per_prompt // self.algo.num_mini_batches
        refusal = self.train_layout.refusal()
        require(refusal is None, str(refusal))
        replicas = self.train_layout.replicas
        shared = f" / trainer.sp={self.trainer.sp} / trainer.tp={self.trainer.tp}"
        ranks = f"cluster.train_ranks={self.cluster.train_ranks}{shared if replicas < self.cluster.train_ranks else ''}"
        require(
            rows % replicas == 0,
            f"prompts_per_step={self.prompts_per_step} x samples_per_prompt={self.samples_per_prompt} / "
            f"algo.num_mini_batches={self.algo.num_mini_batches} = {rows} rows: not divisible by {ranks}; change one",
        )
        trainer = self.trainer
        whole_batch = self.prompts_per_step * self.samples_per_prompt
        require(
            self.algo.kl_target == 0 or self.algo.kl_horizon > 0.2 * whole_batch,
            f"algo.kl_horizon={self.algo.kl_horizon} with prompts_per_step={self.prompts_per_step} x "
            f"samples_per_prompt={self.samples_per_prompt}: one step could make the KL coefficient negative; use more "
            f"than {0.2 * whole_batch:g}",
        )
        require(
            self.sync.probe_tokens < self.rollout.max_model_len,
            f"sync.probe_tokens={self.sync.probe_tokens} with rollout.max_model_len={self.rollout.max_model_len}: the "
            "probe row must be shorter",
        )
        require(
            not (self.reward.separate and self.algo.truncated is Truncated.punish),
            "reward.separate=true with algo.truncated=punish: named rewards are compared one by one, so there is no "
            "one reward to replace; use algo.truncated=mask or keep",
        )
        require(
            not trainer.replay_routing or self.algo.steps_per_batch > 1,
            f"trainer.replay_routing=true with algo.num_mini_batches={self.algo.num_mini_batches}, algo.num_epochs="
            f"{self.algo.num_epochs}: the one update of a batch is its scoring too, so there is nothing to replay",
        )
        require(
            not (trainer.fused_logprobs and self.algo.has_divergence),
            "trainer.fused_logprobs=true with algo.loss=divergence: the divergence reads whole distributions, which "
            "the kernel does not keep; use trainer.fused_logprobs=false",
        )
        require(
            trainer.optimizer is not Optimizer.cpu_adam
            or trainer.offload_optimizer
            or self.cluster.device is not Device.cuda,
            "trainer.optimizer=cpu_adam with trainer.offload_optimizer=false, cluster.device="
            f"{self.cluster.device.value}: it works on weights in host memory; use trainer.offload_optimizer=true, "
            "or trainer.optimizer=adamw",
        )
        require(
            self.lora.rank == 0 or (trainer.tp == trainer.ep == 1),
            f"lora.rank={self.lora.rank} with trainer.tp={trainer.tp}, trainer.ep={trainer.ep}: adapters are not cut; "
            "use trainer.tp=1 and trainer.ep=1",
        )
        require(
            self.lora.rank == 0 or trainer.optimizer is not Optimizer.muon,
            f"lora.rank={self.lora.rank} with trainer.optimizer=muon: adapters are thin, and Muon is for "
            "whole matrices; use trainer.optimizer=adamw",
        )
        require(
            self.lora.rank == 0 or self.algo.reference_refresh == 0,
            f"lora.rank={self.lora.rank} with algo.reference_refresh={self.algo.reference_refresh}: the reference is "
            "the policy without its adapters, and cannot move",
        )
        for key, sizes in (("tp", self.rollout.tp), ("pp", self.rollout.pp)):
            require(
                len(sizes) in (1, self.cluster.rollout_engines),
                f"rollout.{key}={list(sizes)} with cluster.rollout_engines={self.cluster.rollout_engines}: "
                "give one size for all engines or one for each",
            )
        require(
            self.trainer.layout is not Layout.shared_prefix
            or self.prompts_per_step // self.algo.num_mini_batches >= replicas,
            f"trainer.layout=shared_prefix with prompts_per_step={self.prompts_per_step}, algo.num_mini_batches="
            f"{self.algo.num_mini_batches} and {ranks}: "
            "a rank would have no group; use trainer.layout=padded",
        )

    def _check_env(self) -> None:
        """What goes together with an environment, and what only with one."""
        env, target = self.env, self.env._target_
        require(
            target is not None or not self.data.from_env,
            "data.from_env=true with env._target_=null: there is no environment to make tasks; choose one, as in "
            "env=guess",
        )
        require(
            target is None or self.reward._target_ == NO_REWARD,
            f"env._target_={target} with reward._target_={self.reward._target_}: the environment gives the rewards; "
            "use reward=none",
        )
        require(
            env.on_rewrite is not Rewrite.fork or env.context is Context.stop,
            f"env.on_rewrite=fork with env.context={env.context.value}: a conversation that is rendered anew after "
            "each turn has no ids to keep; use env.context=stop",
        )
        require(
            target is None or self.algo.advantage is not Advantage.remax,
            f"env._target_={target} with algo.advantage=remax: the greedy answer is that of one turn; use another "
            "estimator",
        )
        require(
            env.context_tokens <= self.rollout.max_model_len,
            f"env.context_tokens={env.context_tokens} with rollout.max_model_len={self.rollout.max_model_len}: an "
            "engine takes no more than the latter",
        )

    def _check_roles(self) -> None:
        """Each role is there exactly when the algorithm asks for it."""
        algo = self.algo
        require(
            algo.has_critic or (self.critic.path is None and self.critic.warmup_steps == 0),
            f"critic.path={self.critic.path or 'null'}, critic.warmup_steps={self.critic.warmup_steps} with "
            f"algo.advantage={algo.advantage.value}: this estimator has no critic; use algo=ppo, or leave critic.* out",
        )
        require(
            self.critic.warmup_steps < self.num_steps,
            f"critic.warmup_steps={self.critic.warmup_steps} with num_steps={self.num_steps}: "
            "the policy would never be trained",
        )
        require(
            algo.has_teacher == (self.teacher.path is not None),
            f"teacher.path={self.teacher.path or 'null'} with algo.advantage={algo.advantage.value}: "
            + ("give the teacher's folder" if algo.has_teacher else "a teacher needs algo=distill"),
        )
        there = {
            "critic": algo.has_critic,
            "reference": algo.has_reference and self.lora.rank == 0,
            "teacher": algo.has_teacher,
            "reward_model": self.reward_model.path is not None,
        }
        absent = [role for role in self.cluster.colocate if not there[role]]
        require(
            not absent,
            f"cluster.colocate={list(self.cluster.colocate)}: this run has no {' and no '.join(absent)}; leave it out",
        )
        early = algo.dynamic_sampling or algo.has_curriculum or algo.advantage is Advantage.remax
        dynamic = str(algo.dynamic_sampling).lower()
        require(
            self.reward_model.path is None or not early,
            f"reward_model.path={self.reward_model.path} with algo.dynamic_sampling={dynamic}, "
            f"algo.curriculum_low/high={algo.curriculum_low}/{algo.curriculum_high}, algo.advantage="
            f"{algo.advantage.value}: groups are replaced, passed over or compared with the greedy answer by the "
            "reward function alone, before a reward model has scored them; use one of the two",
        )
        require(
            not self.reward.shuffle or (self.reward_model.path is None and not algo.has_teacher),
            f"reward.shuffle=true with reward_model.path={self.reward_model.path or 'null'} and algo.advantage="
            f"{algo.advantage.value}: only the reward function's rewards are permuted, so the run would still learn",
        )
        require(
            not self.reward.separate or algo.advantage is Advantage.group,
            f"reward.separate=true with algo.advantage={algo.advantage.value}: only group advantages have statistics "
            "for each named reward; use algo.advantage=group",
        )
        require(
            algo.overlong_buffer_tokens < self.rollout.max_tokens,
            f"algo.overlong_buffer_tokens={algo.overlong_buffer_tokens} with rollout.max_tokens="
            f"{self.rollout.max_tokens}: the buffer lies inside the completion; it must be smaller",
        )

    @property
    def train_layout(self) -> TrainLayout:
        """How the trained roles are spread over their ranks."""
        trainer = self.trainer
        return TrainLayout(
            ranks=self.cluster.train_ranks,
            zero_stage=trainer.zero_stage,
            sp=trainer.sp,
            tp=trainer.tp,
            ep=trainer.ep,
            hpz=trainer.hpz,
            offload_optimizer=trainer.offload_optimizer,
            offload_parameters=trainer.offload_parameters,
            recompute=trainer.recompute,
            dtype=trainer.dtype,
        )

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the policy in the whole run: the unit of the learning-rate schedule."""
        return (self.num_steps - self.critic.warmup_steps) * self.algo.steps_per_batch

    @property
    def probe_bound(self) -> float:
        """The probe limit in force: `sync.probe_limit`, or the default of the engine's dtype."""
        return self.sync.probe_limit or (1e-3 if self.rollout.dtype is Dtype.float32 else 0.5)

    @property
    def sync_patience_s(self) -> float:
        """Longest wait for ranks in a push: with sync.snapshot they may have to end an update first."""
        return self.sync.timeout_s + (self.trainer.timeout_s if self.sync.snapshot else 0.0)

    def engine_tp(self, engine: int) -> int:
        """Tensor-parallel size of engine number `engine`."""
        return self.rollout.tp[engine if len(self.rollout.tp) > 1 else 0]

    def engine_pp(self, engine: int) -> int:
        """Pipeline stages of engine number `engine`."""
        return self.rollout.pp[engine if len(self.rollout.pp) > 1 else 0]

    def engine_workers(self, engine: int) -> int:
        """Processes that hold a part of engine number `engine`'s model."""
        return self.engine_tp(engine) * self.engine_pp(engine)


SECTIONS: dict[str, type] = {
    "algo": AlgoConfig,
    "model": ModelConfig,
    "data": DataConfig,
    "reward": RewardConfig,
    "env": EnvConfig,
    "trainer": TrainerConfig,
    "lora": LoraConfig,
    "rollout": RolloutConfig,
    "sync": SyncConfig,
    "cluster": ClusterConfig,
    "critic": CriticConfig,
    "teacher": TeacherConfig,
    "reward_model": RewardModelConfig,
    "evaluation": EvaluationConfig,
    "checkpoint": CheckpointConfig,
    "tracking": TrackingConfig,
    "sft": SftConfig,
}


def register() -> None:
    """Adds the schemas to Hydra's store; YAML files name them as the first entry of their `defaults`."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, node in SECTIONS.items():
        store.store(group=group, name="schema", node=node)
