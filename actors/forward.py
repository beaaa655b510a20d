"""Scoring: token log-probabilities of a causal language model, never holding the fp32 logits of a whole row."""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache

from conf.errors import ConfigError
from conf.schema import Layout
from rl.types import Batch

# Attributes of model configs by which a head changes its logits; the scorer reads hidden states, so it would miss them.
LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class Scorer(torch.nn.Module):
    """A causal language model whose forward gives (logprobs, entropy), each [B, T] float32, of a Batch.

    Both are 0 where `action_mask` is False. Log-probabilities are of the sampling distribution: logits / temperature.
    Entropy carries no gradient. One module, so that DeepSpeed sees one forward for each micro-batch.
    """

    def __init__(self, lm: Any, temperature: float, layout: Layout):
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self.layout = layout

    def forward(
        self, batch: Batch, num_chunks: int, temperature: float | None = None, layout: Layout | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        base = getattr(self.lm, self.lm.base_model_prefix)
        head = self.lm.get_output_embeddings()
        if (layout or self.layout) is Layout.padded:
            hidden = padded_hidden(base, batch)
        else:
            hidden = shared_prefix_hidden(base, self.lm.config, batch)
        targets = batch.tokens[batch.action_mask]
        logprobs, entropy = chunked_logprobs(hidden, targets, head, temperature or self.temperature, num_chunks)
        return scatter(logprobs, batch.action_mask), scatter(entropy, batch.action_mask)


def scatter(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N] and [B, T] bool with N True -> [B, T], zero elsewhere; differentiable."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def padded_hidden(base: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Hidden states [N, H] that predict the action tokens, in row-major order.

    Rows are right-padded, so causal attention alone keeps pads out of every real token; no mask is needed.
    """
    hidden = base(input_ids=batch.tokens, use_cache=False).last_hidden_state
    predicted = batch.action_mask.clone()
    predicted[:, 0] = False
    picked: torch.Tensor = hidden[:, :-1][predicted[:, 1:]]
    return picked


def shared_prefix_hidden(base: torch.nn.Module, config: Any, batch: Batch) -> torch.Tensor:
    """As `padded_hidden`, with the prompt of each group computed once.

    The prompt runs with gradients kept; its keys and values are expanded to the rows of the group, whose responses run
    against them. Exact: loss and gradient equal the padded layout's. Action tokens must lie behind `prompt_len`.
    """
    tokens, prompt_len, lengths = batch.tokens, batch.prompt_len, batch.attention_mask.sum(-1)
    _, owner = torch.unique(batch.group_index, return_inverse=True)
    first = torch.stack([(owner == g).nonzero()[0, 0] for g in range(int(owner.max()) + 1)])
    prompts, prompt_lens = tokens[first, : int(prompt_len.max())], prompt_len[first]
    cache = DynamicCache(config=config)
    prompt_hidden = base(input_ids=prompts, past_key_values=cache, use_cache=True).last_hidden_state
    shared = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        shared.update(layer.keys[owner], layer.values[owner], index)

    width = max(
        2, int((lengths - prompt_len).max())
    )  # every rank makes both forwards: they hold collectives under ZeRO-3
    offsets = torch.arange(width, device=tokens.device)
    where = (prompt_len[:, None] + offsets).clamp(max=tokens.shape[1] - 1)
    response = tokens.gather(1, where)
    in_row = prompt_len[:, None] + offsets < lengths[:, None]
    predicted = batch.action_mask.gather(1, where) & in_row
    mask = None
    if int(prompt_lens.min()) != prompts.shape[1]:
        prompt_part = torch.arange(prompts.shape[1], device=tokens.device)[None, :] < prompt_len[:, None]
        mask = torch.cat([prompt_part, torch.ones_like(response[:, :-1], dtype=torch.bool)], 1)
    response_hidden = base(
        input_ids=response[:, :-1],
        past_key_values=shared,
        use_cache=True,
        attention_mask=mask,
        position_ids=prompt_len[:, None] + offsets[:-1],
    ).last_hidden_state
    before = prompt_hidden[torch.arange(len(first), device=tokens.device), prompt_lens - 1]
    hidden = torch.cat([before[owner][:, None], response_hidden], 1)
    picked: torch.Tensor = hidden[predicted]
    return picked


def chunked_logprobs(
    hidden: torch.Tensor, targets: torch.Tensor, head: torch.nn.Module, temperature: float, num_chunks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [N, H], targets [N] -> log-probabilities and entropies [N] float32.

    The head runs on ceil(N / num_chunks) tokens at a time, and again in the backward pass, so that logits
    [tokens, vocabulary] exist for one chunk only. Exactly `num_chunks` calls of `head`, padded with zeros if need be.
    """
    count = len(targets)
    size = max(1, -(-count // num_chunks))
    missing = size * num_chunks - count
    hidden = torch.nn.functional.pad(hidden, (0, 0, 0, missing))
    targets = torch.nn.functional.pad(targets, (0, missing))
    parts = [
        checkpoint(one_chunk, h, t, head, temperature, use_reentrant=False)
        for h, t in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs)[:count], torch.cat(entropy)[:count]


def one_chunk(
    hidden: torch.Tensor, targets: torch.Tensor, head: torch.nn.Module, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of each distribution, in fp32.

    With torch's log_softmax, as in the engine: on some CPUs it is off by 2e-5 over a large vocabulary, always to the
    same side, so that a more accurate sum would differ from what the engine records.
    """
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    all_logprobs = logits.log_softmax(-1)
    logprobs = all_logprobs.gather(-1, targets[:, None])[:, 0]
    with torch.no_grad():
        detached = all_logprobs.detach()
        entropy = -(detached.exp() * detached).sum(-1)
    return logprobs, entropy


def require_supported(config: Any) -> None:
    """Raises ConfigError for models whose head transforms its logits, which the scorer does not reproduce."""
    for name in LOGIT_TRANSFORMS:
        value = getattr(config, name, None)
        if value not in (None, 0, 1, 1.0):
            raise ConfigError(
                f"model.path: {config.model_type} has {name}={value}; "
                "the trainer would score another distribution than the engine samples"
            )
