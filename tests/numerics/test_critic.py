"""The critic beside the policy in the same two processes, in any layout, equals one process of plain torch."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine import optimizer_spec
from actors.group import RankGroup
from actors.roles import ActorCritic
from conf.choices import Advantage, Dtype, Layout
from conf.layout import TrainLayout, every_layout
from conf.schema import AlgoConfig, Config, CriticConfig
from rl.types import Batch
from tests.integration.real import load_hf, restart, start_ranks, started_cluster
from tests.numerics.recipes import TOLERANCE, config, ragged_batch

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(180)]

CRITIC_LR = 0.05
LABELS = ("zero1 dp2", "zero3 dp2", "zero0 dp1 tp2", "zero2 dp1 sp2")
LAYOUTS = {x.label(): x for x in every_layout(2, Dtype.float32) if x.refusal() is None and x.label() in LABELS}


def critic_config(layout: TrainLayout) -> Config:
    fields = {key: value for key, value in vars(layout).items() if key not in ("ranks", "zero_stage")}
    made = config("sgd", layout.zero_stage, 2, layout=Layout.padded, **fields)
    algo = AlgoConfig(advantage=Advantage.gae, num_epochs=1)
    return dataclasses.replace(made, algo=algo, critic=CriticConfig(lr=CRITIC_LR))


@pytest.fixture(scope="module")
def batch(folder: Path) -> Batch:
    """With returns and old values as an older critic would have given them."""
    made, random = ragged_batch(folder), torch.Generator().manual_seed(5)
    mask = made.action_mask
    made.returns, made.values = (
        torch.where(mask, torch.randn(mask.shape, generator=random), torch.zeros(())) for _ in range(2)
    )
    return made


@pytest.fixture(scope="module")
def groups(folder: Path) -> Iterator[tuple[RankGroup, RankGroup]]:
    """The policy's two processes, and the critic in them."""
    first = critic_config(LAYOUTS[LABELS[0]])
    with started_cluster() as cluster:
        policy = start_ranks(cluster, [first], folder)[2]
        yield policy, RankGroup(first, cluster, "critic", str(folder), optimizer_spec(first.trainer), policy)


class PlainCritic:
    """A value head on the body of a model, row by row."""

    def __init__(self, folder: Path):
        self.body = load_hf(folder).model
        self.head = torch.nn.Linear(self.body.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.parameters = [*self.body.parameters(), *self.head.parameters()]

    def values(self, batch: Batch) -> list[torch.Tensor]:
        """Of the state before each action token, for each row."""
        found = []
        for row, length in enumerate(batch.lengths):
            hidden = self.body(batch.tokens[row, :length][None]).last_hidden_state[0]
            found.append(self.head(hidden)[:-1, 0][batch.action_mask[row, 1:length]])
        return found

    def update(self, batch: Batch) -> tuple[float, float]:
        """One SGD step on half the mean squared error to the returns: (loss, norm of the gradient)."""
        assert batch.returns is not None
        pairs = zip(self.values(batch), batch.returns, batch.action_mask, strict=True)
        loss = torch.stack([(v - r[mask]).square().sum() / 2 for v, r, mask in pairs]).sum() / batch.num_action_tokens
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=CRITIC_LR)
        return float(loss.detach()), float(torch.cat([g.flatten() for g in gradients]).norm())


@pytest.mark.parametrize("label", LABELS)
def test_three_updates_equal_plain_torch_and_leave_the_policy_alone(
    groups: tuple[RankGroup, RankGroup], folder: Path, batch: Batch, label: str
) -> None:
    cfg = critic_config(LAYOUTS[label])
    policy = restart(groups[0], cfg, folder)
    before = policy.logprobs(batch)
    restart(groups[1], cfg, folder)
    critic, plain = ActorCritic(cfg, groups[1]), PlainCritic(folder)
    for version in range(3):
        loss, norm = plain.update(batch)
        found = critic.update(batch, version)
        assert (found["critic/loss"], found["critic/grad_norm"]) == pytest.approx((loss, norm), abs=TOLERANCE)
    values, _ = critic.values(batch)
    with torch.no_grad():
        wanted: list[Any] = plain.values(batch)
    for row, expected in enumerate(wanted):
        torch.testing.assert_close(values[row][batch.action_mask[row]], expected, atol=1e-4, rtol=1e-4)
    assert max(float(value.abs().max()) for value in wanted) > 0.05
    assert torch.equal(policy.logprobs(batch), before)
