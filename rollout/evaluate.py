"""Evaluation: held-out prompts, fixed sampling, sampled and greedy."""

from conf.schema import Config
from rl.evaluation import summarize
from rl.roles import Rollouts
from rl.types import Prompt, Sampling


def evaluate(
    cfg: Config, rollouts: Rollouts, prompts: list[Prompt], stop_token_ids: tuple[int, ...]
) -> dict[str, object]:
    """Mean reward and pass@k with fixed sampling: flat under logged names, whole under "sampled" and "greedy"."""
    settings = cfg.evaluation
    out: dict[str, object] = {}
    kinds = [("sampled", settings.temperature, settings.samples, "eval/")]
    if settings.greedy:
        kinds.append(("greedy", 0.0, 1, "eval/greedy_"))
    for label, temperature, samples, prefix in kinds:
        sampling = Sampling(
            max_tokens=cfg.rollout.max_tokens,
            temperature=temperature,
            seed=settings.seed,
            stop_token_ids=stop_token_ids,
        )
        rows = rollouts.sample(prompts, sampling, samples)
        result = summarize([[t.total if t.valid else None for t in row] for row in rows])
        out[label] = result
        if result["mean"] is not None:
            out[f"{prefix}mean"] = float(result["mean"])
        out[f"{prefix}num_failed"] = float(result["num_failed"])
        if label == "sampled":
            out |= {
                f"eval/pass_at_{k}": float(v["value"]) for k, v in result["pass_at"].items() if v["value"] is not None
            }
    return out
