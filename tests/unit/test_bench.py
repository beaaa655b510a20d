"""Benchmarks without running them: arguments, the one schema of results, medians, and yardstick processes."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.choices import Layout
from conf.errors import ConfigError
from rl.faults import RoleDied
from rl.types import Prompt
from scripts import bench
from scripts.benchmarks import common, layouts, rollout, step, train


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def result(**changes: Any) -> dict[str, Any]:
    rows = [{"variant": "tandem", "repeat": 0, "took_s": 1.5}, {"variant": "vllm", "repeat": 0, "took_s": 2}]
    made = common.make_result(Namespace(name="rollout", json="x", repeats=1), rows, {"tok_s_vs_vllm": 1.3}, dtype="f")
    return made | {"took_s": 3.0} | changes


def test_a_result_has_the_schema_and_is_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    common.write_result(result(), path)
    found = json.loads(path.read_text())
    assert set(found) == {"name", "machine", "versions", "config", "rows", "ratios", "took_s"}
    assert found["config"] == {"repeats": 1, "dtype": "f"}
    assert set(found["machine"]) == {"cpu", "cores", "ram_bytes", "os"}
    assert found["versions"]["torch"] == torch.__version__
    common.validate(found)


def test_wrong_result_is_written_and_ends_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    told = result(wrong="it lost a row")
    monkeypatch.setitem(sys.modules, "scripts.benchmarks.logprobs", Namespace(measure=lambda _args: dict(told)))
    assert bench.main(["logprobs", "--json", str(path)]) == 1
    assert "error: it lost a row" in capsys.readouterr().err
    assert json.loads(path.read_text())["rows"] == told["rows"]


def test_a_ratio_may_be_unmeasured() -> None:
    common.validate(result(ratios={"step_vs_trl": None}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"extra": 1}, "fields"),
        ({"rows": []}, "rows"),
        ({"rows": [{"repeat": 0, "took_s": 1.0}]}, r"rows\[0\]"),
        ({"rows": [{"variant": "a", "repeat": -1, "took_s": 1.0}]}, r"rows\[0\].repeat"),
        ({"rows": [{"variant": "a", "repeat": 0}]}, "no figure"),
        ({"rows": [{"variant": "a", "repeat": 0, "took_s": float("nan")}]}, r"rows\[0\].took_s"),
        ({"rows": [{"variant": "a", "repeat": 0, "took_s": "1"}]}, r"rows\[0\].took_s"),
        ({"rows": [{"variant": "a", "repeat": 0, "legal": "no", "took_s": 1.0}]}, r"rows\[0\].legal"),
        ({"rows": [{"variant": "a", "repeat": 0, "reason": ""}]}, "no figure"),
        ({"ratios": {"x": 0.0}}, "ratios.x"),
        ({"ratios": {"x": float("inf")}}, "ratios.x"),
        ({"machine": {"cpu": "x"}}, "machine"),
        ({"versions": {"torch": None}}, "versions.torch"),
        ({"took_s": "3"}, "took_s"),
        ({"took_s": -1.0}, "took_s"),
    ],
)
def test_a_broken_result_is_refused_and_the_place_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(ValueError, match=named):
        common.write_result(result(**changes), path)
    assert not path.exists()


def test_a_figure_may_be_unmeasured_and_is_then_not_among_the_medians(capsys: pytest.CaptureFixture[str]) -> None:
    refused = {"variant": "b", "repeat": 0, "layout": "b", "legal": False, "reason": "too large", "peak_bytes": None}
    found = result(rows=[{"variant": "a", "repeat": 0, "peak_bytes": 1.0, "state_bytes": None}, refused])
    common.validate(found)
    assert common.medians(found["rows"])["a"] == {"peak_bytes": 1.0}
    common.print_result(found)
    assert "refused (1): too large" in capsys.readouterr().out


def test_layouts_can_be_chosen_by_name_and_illegal_ones_cannot() -> None:
    def chosen(only: list[str] | None, everything: bool = False) -> list[str]:
        return [x.label() for x in layouts.chosen_layouts(Namespace(only=only, all=everything))]

    assert chosen(["zero3 dp2 hpz2", "zero0 dp2"]) == ["zero0 dp2", "zero3 dp2 hpz2"]
    assert len(chosen(None)) < len(chosen(None, everything=True))
    for name in ("zero3 dp1 tp2", "zero9"):
        with pytest.raises(ConfigError, match=f"--only '{name}': no legal layout; they are: zero0 dp2, "):
            chosen([name])


class PretendedGroups:
    """Takes the place of processes: notes in which layouts they were started and restarted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.events: list[str] = []
        figures = {"max_loss_diff": 0.0, "max_grad_rel_diff": 0.0, "update_s": 1.0, "peak_bytes": 2, "state_bytes": 1}
        figures["tok_s_ratio"] = 1.0
        monkeypatch.setattr(layouts, "started", self.started)
        monkeypatch.setattr(layouts, "restart", lambda group, cfg, folder: self.events.append(self.of("restart", cfg)))
        monkeypatch.setattr(layouts, "plain_updates", lambda *_: ([], []))
        monkeypatch.setattr(layouts, "folder_shapes", lambda _: {"w": (2, 2)})
        monkeypatch.setattr(layouts, "ddp_updates", lambda *_: nullcontext(lambda: 1.0))
        monkeypatch.setattr(layouts, "environment_of", lambda _: {})
        monkeypatch.setattr(layouts, "measure_layout", lambda *_: dict(figures))

    def of(self, event: str, cfg: Any) -> str:
        return f"{event} {cfg.train_layout.label()}"

    @contextmanager
    def started(self, cluster: Any, cfg: Any, folder: Path) -> Iterator[Namespace]:
        self.events.append(self.of("start", cfg))
        yield Namespace(actors=[None])
        self.events.append(self.of("end", cfg))


def test_layouts_of_zero3_have_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = PretendedGroups(monkeypatch)
    wanted = ["zero0 dp2", "zero1 dp2", "zero3 dp2", "zero3 dp2 hpz2"]
    chosen = layouts.chosen_layouts(Namespace(only=wanted, all=False))
    rows = layouts.measure_model(Namespace(repeats=1), None, Path("m"), chosen, layouts.random_batch())
    assert groups.events == [
        "start zero0 dp2", "restart zero1 dp2", "end zero0 dp2",
        "start zero3 dp2", "end zero3 dp2",
        "start zero3 dp2 hpz2", "end zero3 dp2 hpz2",
    ]  # fmt: skip
    assert [row["layout"] for row in rows] == wanted


def test_every_row_of_the_layouts_has_every_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    PretendedGroups(monkeypatch)
    monkeypatch.setattr(layouts, "model_folder", lambda out, experts: out)
    long_row = {"variant": "row", "layout": "zero0 dp2", "legal": True, "reason": "", "peak_bytes": 3}
    monkeypatch.setattr(layouts, "measure_long_row", lambda *_: [long_row])
    monkeypatch.setattr("actors.cluster.Cluster", lambda _: Namespace(stop=lambda: None))
    args = Namespace(name="layouts", json="x", repeats=1, only=None, all=False, long_tokens=8)
    found = layouts.measure(args) | {"took_s": 1.0}
    common.write_result(found, tmp_path / "r.json")
    keys = {"layout", "legal", "reason", "max_loss_diff", "max_grad_rel_diff", "tok_s_ratio", "peak_bytes"}
    assert all(keys | {"state_bytes", "predicted_bytes"} <= row.keys() for row in found["rows"])
    legal = [row for row in found["rows"] if row["legal"]]
    assert len(legal) == 57 and all(row["reason"] for row in found["rows"] if not row["legal"])
    assert all(row["predicted_bytes"] > 0 and row["tok_s_ratio"] == 1.0 for row in legal[:-1])


def test_medians_are_by_variant_and_leave_out_what_some_rows_lack() -> None:
    rows: list[dict[str, Any]] = [
        {"variant": "a", "repeat": 0, "took_s": 1.0, "tok_s": 5.0},
        {"variant": "b", "repeat": 0, "took_s": 9.0},
        {"variant": "a", "repeat": 1, "took_s": 3.0},
        {"variant": "a", "repeat": 2, "took_s": 2.0, "tok_s": 6.0},
    ]
    assert common.medians(rows) == {"a": {"took_s": 2.0}, "b": {"took_s": 9.0}}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (16, "16"), (538060032, "538,060,032"), (0.01234, "0.01234"), (12.345, "12.35"), (1234.5, "1,234")],
)
def test_figures_are_readable(value: float, text: str) -> None:
    assert common.figure_text(value) == text


def test_the_table_shows_medians_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_result(result(ratios={"tok_s_vs_vllm": 1.3, "other": None}))
    printed = capsys.readouterr().out
    assert "tandem (1 runs)" in printed and "1.500" in printed
    assert "tok_s_vs_vllm: 1.300" in printed and "other: not measured" in printed


@pytest.mark.parametrize("name", list(bench.NAMES))
def test_each_benchmark_has_a_file_and_the_common_arguments(name: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "r.json"
    with_model = [] if name in ("logprobs", "algorithms", "layouts") else ["--model", str(model)]
    args = bench.parse_args([name, "--json", str(out), "--repeats", "3", *with_model])
    assert (args.name, args.repeats, args.json) == (name, 3, out)
    assert not with_model or args.model == str(model)
    assert out.parent.is_dir()
    assert (common.ROOT / "scripts" / "benchmarks" / f"{name}.py").is_file()


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["speed", "--json", "r.json"],
        ["rollout"],
        ["rollout", "--json", "{tmp}/r.json", "--repeats", "0"],
        ["rollout", "--json", "{tmp}/r.json", "--repeats", "x"],
        ["rollout", "--json", "{tmp}/r.json", "--samples", "1"],
        ["rollout", "--json", "{tmp}/r.json", "--skip-yardstick"],
        ["rollout", "--json", "{tmp}/r.json", "--model", "{tmp}/none"],
        ["rollout", "--json", "{tmp}", "--model", "{model}"],
        ["rollout", "--json", "{model}/config.json/r.json", "--model", "{model}"],
    ],
)
def test_bad_arguments_end_with_code_2(argv: list[str], model: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.parse_args([text.format(tmp=tmp_path, model=model) for text in argv])
    assert stop.value.code == 2


def test_help_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'ray', 'vllm'} & set(sys.modules)"
    code = f"import sys; from scripts import bench; bench.build_parser(); print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=common.ROOT, check=True)
    assert done.stdout.strip() == "set()"


def test_the_config_takes_sizes_threads_and_a_path_with_spaces(tmp_path: Path) -> None:
    args = Namespace(model=str(tmp_path / "a b"), threads=1, prompts=3, samples=2, max_tokens=5)
    cfg = common.bench_config(args, "num_steps=7")
    assert cfg.model.path == args.model
    assert (cfg.prompts_per_step, cfg.samples_per_prompt, cfg.rollout.max_tokens, cfg.num_steps) == (3, 2, 5, 7)
    assert (cfg.trainer.num_threads, cfg.rollout.num_threads) == (1, 1)
    assert not (cfg.evaluation.every or cfg.tracking.wandb or cfg.checkpoint.at_end or cfg.checkpoint.export)


def test_the_recorded_batch_is_the_quickstarts_and_always_the_same() -> None:
    prompts = [Prompt(index=i, token_ids=list(range(43)), record={}) for i in range(8)]
    batch = train.recorded_batch(prompts, samples=8, max_tokens=16)
    assert batch.num_rows == 64 and batch.num_action_tokens == 64 * 12
    assert batch.advantages is not None and bool((batch.advantages[batch.action_mask] != 0).all())
    assert torch.equal(batch.tokens, train.recorded_batch(prompts, samples=8, max_tokens=16).tokens)
    cfg = common.bench_config(Namespace(model="m", threads=1))
    for layout in Layout:
        micros = train.micro_batches(cfg, batch, layout)
        assert sum(micro.batch.num_action_tokens for micro in micros if micro.batch) == batch.num_action_tokens


def test_different_work_or_settings_are_refused() -> None:
    same = {variant: {"grad_norm": 4.0, "entropy": 0.5} for variant in ("tandem", "torch", "torch, padded")}
    train.require_same_work(same | {"tandem": {"grad_norm": 4.0002, "entropy": 0.500004}})
    for variant, name, value in [
        ("tandem", "grad_norm", 4.001),
        ("tandem", "grad_norm", float("nan")),
        ("torch", "grad_norm", 4.0001),
        ("tandem", "entropy", 0.50002),
        ("torch", "entropy", float("nan")),
    ]:
        with pytest.raises(RoleDied, match=f"{name} differs"):
            train.require_same_work(same | {variant: same[variant] | {name: value}})
    rollout.require_equal({"num_threads": "2"}, {"num_threads": "2"})
    with pytest.raises(RoleDied, match="num_threads: 2 in Tandem, 1 in vLLM"):
        rollout.require_equal({"num_threads": "2"}, {"num_threads": "1"})
    with pytest.raises(RoleDied, match="1023 tokens, 1024 expected"):
        rollout.require_count("vllm", 1023, 1024)


def test_the_warm_memory_of_sync_holds_every_tensor(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from scripts.benchmarks import sync_speed

    weights = {f"model.layers.{i}.w": torch.randn(40, 40) for i in range(5)}
    save_file({k: v for k, v in weights.items() if not k.endswith("4.w")}, tmp_path / "a.safetensors")
    save_file({"model.layers.4.w": weights["model.layers.4.w"]}, tmp_path / "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {name: "b" if name.endswith("4.w") else "a" for name in weights}})
        .replace('"a"', '"a.safetensors"')
        .replace('"b"', '"b.safetensors"')
    )
    (tmp_path / "config.json").write_text("{}")
    warm = sync_speed.fill_memory(tmp_path, "float32")
    places = warm.info["places"]
    found = {name: sync_speed.view_of(warm.ring.memory, at, shape, torch.float32) for name, at, shape in places}
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    warm.ring.close()


def test_steps_leave_out_what_was_logged_before_the_first(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "eval/mean": 0.1}\n{"step": 1, "time/step_s": 2.0}\n')
    assert step.read_steps(path) == [{"step": 1, "time/step_s": 2.0}]


def test_a_program_that_fails_is_reported_with_its_last_words() -> None:
    assert step.run_program([sys.executable, "-c", "print(7)"], dict(os.environ)) == "7\n"
    with pytest.raises(RoleDied, match=r"code 3:\n.*broken"):
        step.run_program([sys.executable, "-c", "import sys; print('broken'); sys.exit(3)"], dict(os.environ))


def test_a_yardstick_answers_fails_and_dies_in_words() -> None:
    env = dict(os.environ)
    with common.Yardstick("collections:Counter", env, {"a": 2}) as counter:
        assert counter.call("most_common") == [("a", 2)]
        with pytest.raises(RoleDied, match="AttributeError"):
            counter.call("nothing")
        assert counter.call("total") == 2
    with pytest.raises(RoleDied, match="ModuleNotFoundError"):
        common.Yardstick("no_such_module:X", env)
    with common.Yardstick("code:InteractiveConsole", env) as console:
        console.call("push", "import os; print('last words', flush=True)")
        with pytest.raises(RoleDied, match="last words"):
            console.call("push", "os._exit(1)")
