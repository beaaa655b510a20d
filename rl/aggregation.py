"""From per-token losses to one number, by global counts: what each row weighs in the sum."""

import torch

from conf.choices import Aggregation


def loss_weights(aggregation: Aggregation, action_mask: torch.Tensor, constant_tokens: int) -> torch.Tensor | None:
    """Weight [B] float64 of each row such that sum(weight * loss) / N is the aggregate of the batch; None is all 1.

    N counts the batch's action tokens, S its rows with any. token_mean: sum / N (Yu et al. 2025, DAPO);
    sequence_mean: the mean over rows of their token means (Shao et al. 2024, GRPO); sequence_sum: sum / (S L) with the
    constant L = `constant_tokens` (Liu et al. 2025, Dr.GRPO). Take it over the whole (mini-)batch, before any cut.
    """
    length = action_mask.sum(-1).double()
    tokens, rows = length.sum(), (length > 0).sum().clamp(min=1)
    match aggregation:
        case Aggregation.token_mean:
            return None
        case Aggregation.sequence_mean:
            return tokens / (rows * length.clamp(min=1))
        case Aggregation.sequence_sum:
            return (tokens / (rows * constant_tokens)).expand(len(length)).clone()
