"""Scoring: token log-probabilities of a causal language model, never holding the fp32 logits of a whole row."""

import contextlib
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import DynamicCache

from actors.fused import FusedTokenScores
from actors.sequence import SequenceGroup, sum_across
from conf.choices import Layout
from rl.types import Batch


class Scorer(torch.nn.Module):
    """A causal language model whose forward gives (logprobs, entropy[, divergence]), each [B, T] float32, of a Batch.

    All are 0 where `action_mask` is False. Log-probabilities are of the sampling distribution: logits / temperature.
    The third, only where the batch holds `teacher_ids`, is the reverse KL of each token to the teacher's distribution.
    One module with plain tensors as results, so that DeepSpeed sees one forward for each micro-batch.
    `fused`: through compiled kernels (actors/fused.py).
    """

    def __init__(
        self,
        lm: Any,
        temperature: float,
        layout: Layout,
        sequence: SequenceGroup | None = None,
        fused: bool = False,
    ):
        super().__init__()
        self.fused = fused
        self.lm = lm
        self.temperature = temperature
        self.layout = layout
        self.sequence = sequence

    def forward(
        self, batch: Batch, num_chunks: int, temperature: float | None = None, layout: Layout | None = None
    ) -> tuple[torch.Tensor, ...]:
        base = getattr(self.lm, self.lm.base_model_prefix)
        hidden, own = hidden_states(base, self.lm.config, batch, layout or self.layout, self.sequence)
        teacher = None
        if batch.teacher_ids is not None and batch.teacher_topk is not None:
            teacher = (batch.teacher_ids[own], batch.teacher_topk[own])
        head, scale = self.lm.get_output_embeddings(), temperature or self.temperature
        found = chunked_scores(hidden, batch.tokens[own], head, scale, num_chunks, teacher, self.fused)
        return tuple(sum_across(scatter(values, own), self.sequence) for values in found)


class TopScorer(torch.nn.Module):
    """A causal language model whose forward gives its k likeliest tokens at each place: ids and logprobs [B, T, k].

    Of the first `vocabulary` tokens: models of one family pad their embeddings to different sizes.
    """

    def __init__(self, scorer: Scorer, top_k: int, vocabulary: int):
        super().__init__()
        self.scorer, self.top_k, self.vocabulary = scorer, top_k, vocabulary

    def forward(self, batch: Batch, num_chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
        lm, sequence = self.scorer.lm, self.scorer.sequence
        base, head = getattr(lm, lm.base_model_prefix), lm.get_output_embeddings()
        hidden, own = hidden_states(base, lm.config, batch, self.scorer.layout, sequence)
        parts = [
            (head(part).float()[:, : self.vocabulary] / self.scorer.temperature).log_softmax(-1).topk(self.top_k)
            for part in hidden.split(max(1, -(-len(hidden) // num_chunks)))
        ]
        shape = (*batch.tokens.shape, self.top_k)
        ids, logprobs = (torch.zeros(shape, dtype=kind, device=own.device) for kind in (torch.long, torch.float32))
        ids[own] = torch.cat([p.indices for p in parts])
        logprobs[own] = torch.cat([p.values for p in parts])
        return sum_across(ids, sequence).cpu(), sum_across(logprobs, sequence).cpu()


class ValueScorer(torch.nn.Module):
    """A causal language model's body with a value head: forward gives V [B, T] of the state before each action token.

    The head starts at zero: the first values are 0, whatever the body.
    """

    def __init__(self, body: Any, layout: Layout, sequence: SequenceGroup | None = None):
        super().__init__()
        self.body = body
        self.value_head = torch.nn.Linear(body.config.hidden_size, 1, dtype=next(body.parameters()).dtype)
        torch.nn.init.zeros_(self.value_head.weight)
        torch.nn.init.zeros_(self.value_head.bias)
        self.layout, self.sequence = layout, sequence

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden, own = hidden_states(self.body, self.body.config, batch, self.layout, self.sequence)
        return sum_across(scatter(self.value_head(hidden)[:, 0].float(), own), self.sequence)


def scatter(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N] and [B, T] bool with N True -> [B, T], zero elsewhere; differentiable."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


def hidden_states(
    base: torch.nn.Module, config: Any, batch: Batch, layout: Layout, sequence: SequenceGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [N, H] that predict action tokens, in row-major order, and a mask [B, T] of those tokens.

    All action tokens, but for sequence parallelism: then those that this rank's share of each row predicts.
    """
    if sequence is not None:
        return own_hidden(base, batch, sequence)
    if layout is Layout.packed:
        return packed_hidden(base, batch), batch.action_mask
    if layout is Layout.padded:
        return padded_hidden(base, batch), batch.action_mask
    return shared_prefix_hidden(base, config, batch), batch.action_mask


def run(base: Any, real: torch.Tensor, routes: torch.Tensor | None, **inputs: Any) -> torch.Tensor:
    """The body's last hidden states, of [B, T] tokens.

    For a model that counts its routes: `real` [B, T], tokens that are no padding, and `routes` [B, T, layers, k], the
    experts that they must take.
    """
    with base.routing.reading(real, routes) if hasattr(base, "routing") else contextlib.nullcontext():
        hidden: torch.Tensor = base(**inputs).last_hidden_state
    return hidden


def real_tokens(batch: Batch) -> torch.Tensor:
    """[B, T]: the tokens of rows that are trained on; a dummy has none."""
    return batch.attention_mask & batch.action_mask.any(-1, keepdim=True)


def padded_hidden(base: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Hidden states [N, H] that predict the action tokens, in row-major order.

    Rows are right-padded, so causal attention alone keeps pads out of every real token; no mask is needed.
    """
    hidden = run(base, real_tokens(batch), batch.routes, input_ids=batch.tokens, use_cache=False)
    predicted = batch.action_mask.clone()
    predicted[:, 0] = False
    picked: torch.Tensor = hidden[:, :-1][predicted[:, 1:]]
    return picked


def packed_hidden(base: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """As `padded_hidden`, with the rows one behind another as one row without padding.

    Positions start again at 0 for each row, by which the attention knows the boundaries.
    """
    places = batch.attention_mask.cumsum(-1) - 1
    tokens, positions = (x[batch.attention_mask][None] for x in (batch.tokens, places))
    real = real_tokens(batch)[batch.attention_mask]
    routes = None if batch.routes is None else batch.routes[batch.attention_mask][None]
    hidden = run(base, real, routes, input_ids=tokens, position_ids=positions, use_cache=False)[0]
    predicts = batch.action_mask.roll(-1, dims=1)
    picked: torch.Tensor = hidden[predicts[batch.attention_mask]]
    return picked


def own_hidden(base: torch.nn.Module, batch: Batch, sequence: SequenceGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """As `hidden_states`, of this rank's share: columns [first, first + width) of every row."""
    length = batch.tokens.shape[1]
    width = -(-length // sequence.size)
    first = width * sequence.rank
    tokens, real = (
        torch.nn.functional.pad(x, (0, width * sequence.size - length))[:, first : first + width]
        for x in (batch.tokens, real_tokens(batch))
    )
    positions = torch.arange(first, first + width, device=tokens.device)[None]
    hidden = run(base, real, None, input_ids=tokens, position_ids=positions, use_cache=False)
    columns = torch.arange(length, device=tokens.device)
    own = batch.action_mask & (columns > first) & (columns <= first + width)
    predicts = torch.nn.functional.pad(own, (0, 1 + width * sequence.size - length))[:, 1 + first : 1 + first + width]
    return hidden[predicts], own


def shared_prefix_hidden(base: torch.nn.Module, config: Any, batch: Batch) -> torch.Tensor:
    """As `padded_hidden`, with the prompt of rows that share it computed once.

    The prompt runs with gradients kept; its keys and values are expanded to the rows of the group, whose responses run
    against them. Exact: loss and gradient equal the padded layout's. Action tokens must lie behind `prompt_len`.
    """
    tokens, prompt_len, lengths = batch.tokens, batch.prompt_len, batch.attention_mask.sum(-1)
    _, owner = torch.unique(batch.prefix_index, return_inverse=True)
    first = torch.stack([(owner == g).nonzero()[0, 0] for g in range(int(owner.max()) + 1)])
    prompts, prompt_lens = tokens[first, : int(prompt_len.max())], prompt_len[first]
    cache = DynamicCache(config=config)
    trained = batch.action_mask.any(-1, keepdim=True)
    in_prompt = torch.arange(prompts.shape[1], device=tokens.device) < prompt_lens[:, None]
    real = in_prompt & trained[first]
    prompt_hidden = run(base, real, None, input_ids=prompts, past_key_values=cache, use_cache=True)
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
    response_hidden = run(
        base,
        (in_row & trained)[:, :-1],
        None,
        input_ids=response[:, :-1],
        past_key_values=shared,
        use_cache=True,
        attention_mask=mask,
        position_ids=prompt_len[:, None] + offsets[:-1],
    )
    before = prompt_hidden[torch.arange(len(first), device=tokens.device), prompt_lens - 1]
    hidden = torch.cat([before[owner][:, None], response_hidden], 1)
    picked: torch.Tensor = hidden[predicted]
    return picked


def chunked_scores(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: torch.nn.Module,
    temperature: float,
    num_chunks: int,
    teacher: tuple[torch.Tensor, torch.Tensor] | None = None,
    fused: bool = False,
) -> list[torch.Tensor]:
    """hidden [N, H], targets [N] -> log-probabilities, entropies (and divergences) [N] float32.

    `teacher`: ids and log-probabilities [N, k] of its likeliest tokens. The head runs on ceil(N / num_chunks) tokens at
    a time, and again in the backward pass, so that logits [tokens, vocabulary] exist for one chunk only. Exactly
    `num_chunks` calls of `head`, padded with zeros if need be.
    """
    count = len(targets)
    size = max(1, -(-count // num_chunks))
    inputs = [hidden, targets, *(teacher or ())]
    missing = size * num_chunks - count
    padded = [torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) for x in inputs]
    score = one_chunk_against_teacher if teacher is not None else one_chunk_fused if fused else one_chunk
    parts = [
        checkpoint(score, head, temperature, *chunk, use_reentrant=False)
        for chunk in zip(*(x.split(size) for x in padded), strict=True)
    ]
    return [torch.cat(column)[:count] for column in zip(*parts, strict=True)]


def one_chunk(
    head: torch.nn.Module, temperature: float, hidden: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Log-probability of each target and entropy of each distribution, in fp32."""
    logits = at_least_fp32(head(hidden))
    if temperature != 1.0:
        logits = logits / temperature
    found: tuple[torch.Tensor, ...] = TokenScores.apply(logits, targets)
    return found


def one_chunk_fused(
    head: torch.nn.Module, temperature: float, hidden: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """As `one_chunk`, through compiled kernels."""
    found: tuple[torch.Tensor, ...] = FusedTokenScores.apply(head(hidden), targets, temperature)
    return found


def one_chunk_against_teacher(
    head: torch.nn.Module,
    temperature: float,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    teacher_ids: torch.Tensor,
    teacher_logprobs: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """As `one_chunk`, and the reverse KL to the teacher: sum of p (log p - log q) over its likeliest tokens, and over
    all others together as one outcome. Equal to the whole KL when they are the whole vocabulary, never above it."""
    every = (at_least_fp32(head(hidden)) / temperature).log_softmax(-1)
    entropy = -torch.linalg.vecdot(every.exp(), every)
    ours = every.gather(-1, teacher_ids)
    divergence = (ours.exp() * (ours - teacher_logprobs)).sum(-1)
    if teacher_ids.shape[-1] < every.shape[-1]:
        tiny = torch.finfo(torch.float32).eps
        rest, their_rest = ((1 - x.exp().sum(-1)).clamp(min=tiny) for x in (ours, teacher_logprobs))
        divergence = divergence + rest * (rest.log() - their_rest.log())
    return every.gather(-1, targets[:, None])[:, 0], entropy, divergence


def at_least_fp32(logits: torch.Tensor) -> torch.Tensor:
    """Half precisions as fp32: sums over a vocabulary need it. fp64 stays."""
    return logits if logits.dtype is torch.float64 else logits.float()


class TokenScores(torch.autograd.Function):
    """logits [N, V] fp32, targets [N] -> log-probabilities and entropies [N], with at most three [N, V] buffers.

    With p = softmax(z): d log p_y / d z = onehot(y) - p, and d H / d z = -p (log p + H).
    With torch's log_softmax, as in the engine: on some CPUs it is off by 2e-5 over a large vocabulary, always to the
    same side, so that a more accurate sum would differ from what the engine records.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        every = logits.log_softmax(-1)
        entropy = -torch.linalg.vecdot(every.exp(), every)
        ctx.save_for_backward(every, targets, entropy)
        ctx.set_materialize_grads(False)
        return every.gather(-1, targets[:, None])[:, 0], entropy

    @staticmethod
    def backward(
        ctx: Any, of_logprobs: torch.Tensor | None, of_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        every, targets, entropy = ctx.saved_tensors
        gradient = every.exp()
        if of_entropy is not None:
            scale = (every + entropy[:, None]).mul_(-of_entropy[:, None])
            if of_logprobs is not None:
                scale.sub_(of_logprobs[:, None])
            gradient.mul_(scale)
        elif of_logprobs is not None:
            gradient.mul_(-of_logprobs[:, None])
        if of_logprobs is not None:
            gradient.scatter_add_(-1, targets[:, None], of_logprobs[:, None])
        return gradient, None
