"""A rollout as a line of rollouts.jsonl: what scripts/view_rollouts.py shows of it."""

from typing import Any

from rl.types import Group, Trajectory

MOST_TOKENS = 8192  # of a row; a longer one loses its middle


def describe_rollout(step: int, group: Group, trajectory: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """Everything that a person may want to know of one episode, as JSON can hold it."""
    t = trajectory
    return {
        "step": step,
        "position": group.position,
        "prompt": group.prompt.record.get("prompt"),
        "task": group.prompt.record if not group.prompt.token_ids else None,
        "completion": t.text,
        "reward": t.total if t.valid else None,
        "status": t.status.value,
        "error": t.error,
        "truncated": t.truncated,
        "num_tokens": t.num_action_tokens,
        "metrics": t.metrics,
        "transcript": t.transcript,
        "rows": [describe_row(row, tokenizer) for row in t.rows if row.token_ids],
    }


def describe_row(row: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """One row, token by token: text, whether it is trained, log-probability, weight version and reward."""
    count = len(row.token_ids)
    keep = list(range(count))
    if count > MOST_TOKENS:
        keep = [*range(MOST_TOKENS // 2), *range(count - MOST_TOKENS // 2, count)]
    rewards = row.token_rewards or [0.0] * count
    return {
        "agent": row.agent,
        "reward": row.reward,
        "prompt_len": row.prompt_len,
        "num_tokens": count,
        "ids": [row.token_ids[n] for n in keep],
        "tokens": [tokenizer.decode([row.token_ids[n]]) for n in keep],
        "trained": [int(row.action_mask[n]) for n in keep],
        "logprobs": [round(row.logprobs[n], 4) for n in keep],
        "versions": [row.versions[n] for n in keep],
        "rewards": {str(k): rewards[n] for k, n in enumerate(keep) if rewards[n]},
    }
