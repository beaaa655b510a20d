"""Low-rank adapters on two ranks at every ZeRO stage, against peft in one process of plain torch."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from actors.checkpoint import copy_model_files, export_hf
from actors.group import RankGroup
from actors.lora import add_adapters
from actors.roles import ActorPolicy, ActorReference
from conf.choices import Layout
from conf.launch import to_dict
from conf.schema import Config, LoraConfig
from rl.run_folder import write_json
from rl.types import Batch
from scripts.reshard import reshard
from tests.integration.real import export, load_hf, restart, start_ranks, started_cluster
from tests.numerics.plain import PlainPolicy, all_logprobs
from tests.numerics.recipes import TEMPERATURE, TOLERANCE, config, ragged_batch

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(180)]

LORA = LoraConfig(rank=4, alpha=8)


def lora_config(stage: int) -> Config:
    made = config("adamw", stage, 2, layout=Layout.shared_prefix)
    return dataclasses.replace(made, lora=LORA)


@pytest.fixture(scope="module")
def batch(folder: Path) -> Batch:
    return ragged_batch(folder)


@pytest.fixture(scope="module")
def group(folder: Path) -> Iterator[RankGroup]:
    with started_cluster() as cluster:
        yield start_ranks(cluster, [lora_config(1)], folder)[2]


def adapters(policy: ActorPolicy, source: Path, out: Path) -> dict[str, torch.Tensor]:
    policy.group.call("export_adapter", str(out), str(source))
    return load_file(out / "adapter_model.safetensors")


class PlainAdapters(PlainPolicy):
    """The plain policy with adapters, which start as the given ones."""

    def __init__(self, cfg: Config, folder: Path, start: dict[str, torch.Tensor]):
        super().__init__(cfg, folder)
        add_adapters(self.lm, cfg.lora)
        trained: dict[str, Any] = {n: p for n, p in self.lm.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, value in self.named(start).items():
                trained[name].copy_(value)
        self.parameters = list(trained.values())
        trainer = cfg.trainer
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=trainer.lr, eps=trainer.eps, weight_decay=trainer.weight_decay
        )

    @staticmethod
    def named(adapters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The names of a folder of adapters as those of the modules."""
        return {
            n.removeprefix("base_model.model.").replace(".weight", ".default.weight"): t for n, t in adapters.items()
        }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_updates_equal_plain_torch_and_the_base_stays(
    group: RankGroup, folder: Path, batch: Batch, tmp_path: Path, stage: int
) -> None:
    cfg = lora_config(stage)
    policy = restart(group, cfg, folder)
    plain = PlainAdapters(cfg, folder, adapters(policy, folder, tmp_path / "start"))
    for number in range(3):
        wanted = plain.update(batch)
        found = policy.update(batch, number * 2, number)
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=TOLERANCE)
    moved = plain.named(adapters(policy, folder, tmp_path / "end"))
    for name, parameter in plain.lm.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(moved[name], parameter.detach(), atol=TOLERANCE, rtol=0)
    mask = batch.action_mask
    whole = all_logprobs(load_hf(export(policy, folder, tmp_path / "hf")), batch, TEMPERATURE)
    for logprobs in (policy.logprobs(batch), all_logprobs(plain.lm, batch, TEMPERATURE)):
        assert float((whole - logprobs)[mask].abs().max()) <= 10 * TOLERANCE
    base = all_logprobs(load_hf(folder), batch, TEMPERATURE)
    reference = ActorReference(cfg, group, "base_logprobs").logprobs(batch)
    assert float((reference - base)[mask].abs().max()) <= 10 * TOLERANCE
    assert float((whole - base)[mask].abs().max()) > 1e-3


@pytest.mark.parametrize(("saved", "read"), [(1, 3), (3, 2), (2, 0)])
def test_checkpoint_holds_the_adapters_alone_and_continues_at_another_stage(
    group: RankGroup, folder: Path, batch: Batch, tmp_path: Path, saved: int, read: int
) -> None:
    cfg, out = lora_config(saved), tmp_path / "checkpoint"
    policy = restart(group, cfg, folder)
    policy.update(batch, 0, 0)
    out.mkdir()
    entries = [entry for rank in group.call("save", str(out)) for entry in rank]
    assert all(".lora_" in name for entry in entries for name in entry["tensors"])
    manifest = {"format": 2, "step": 1, "files": entries, "run_state": {}, "config": to_dict(cfg), "base": str(folder)}
    write_json(out / "manifest.json", manifest | {"roles": {"policy": group.call("state")[0]}})
    merged = load_file(export(policy, folder, tmp_path / "hf") / "model.safetensors")
    copy_model_files(folder, out / "model")
    from_checkpoint = load_file(export_hf(out, tmp_path / "exported") / "model.safetensors")
    for name, tensor in merged.items():
        torch.testing.assert_close(from_checkpoint[name], tensor, atol=1e-6, rtol=1e-5)
    reshard(cfg, out, "hf", tmp_path / "resharded", None)
    resharded = load_file(tmp_path / "resharded/model-00001-of-00001.safetensors")
    assert resharded.keys() == from_checkpoint.keys()
    assert all(torch.equal(resharded[name], tensor) for name, tensor in from_checkpoint.items())
    wanted = policy.update(batch, 2, 1)
    second = restart(group, lora_config(read), folder)
    second.group.call("load", str(out))
    found = second.update(batch, 2, 1)
    for name in ("policy/policy_loss", "policy/kl", "policy/grad_norm", "policy/entropy"):
        assert found[name] == pytest.approx(wanted[name], abs=TOLERANCE)
