import json
import math
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rl.tracking
from conf.schema import TrackingConfig
from rl.tracking import JsonlLogger, exit_code_of, open_loggers, read_metrics, wandb_mode, without_secrets


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_RUN_ID", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


@pytest.fixture
def fresh_wandb() -> Iterator[None]:
    """W&B reads the environment once in a process; these tests change it."""
    import wandb

    wandb.teardown()
    yield
    wandb.teardown()


def config(**changes: Any) -> TrackingConfig:
    return TrackingConfig(**{"wandb": False, **changes})


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def offline_records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: a 7-byte header, then 32 KiB blocks of chunks (crc, length, type, bytes)."""
    from wandb.proto import wandb_internal_pb2 as protocol

    data = file.read_bytes()
    offset, whole = 7, b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        whole += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # full, last
            record = protocol.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def read_offline(folder: Path) -> dict[str, Any]:
    """Steps, exit code, id and config of one offline run folder."""
    (file,) = folder.glob("*.wandb")
    found: dict[str, Any] = {"rows": [], "exit_code": None, "config": {}, "metrics": []}
    for record in offline_records(file):
        if record.HasField("history"):
            items = record.history.item
            found["rows"].append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        if record.HasField("exit"):
            found["exit_code"] = record.exit.exit_code
        if record.HasField("run"):
            found["id"] = record.run.run_id
            found["config"] = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("metric"):
            found["metrics"].append((record.metric.name or record.metric.glob_name, record.metric.step_metric))
    return found


def offline_folders(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "wandb").glob("offline-run-*"))


def test_wandb_offline_run_crash_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    secret = {"name": "x", "reward": {"kwargs": {"api_key": "hunter2", "max_tokens": 5}}}
    said: list[str] = []
    with pytest.raises(RuntimeError), open_loggers(config(wandb=True), tmp_path, secret, {}, 0, said.append) as tracker:
        for step in range(1, 8):
            tracker.log(step, {"reward/mean": step / 10, **({"eval/mean": 0.5} if step == 3 else {})})
        raise RuntimeError("crash at step 7")
    assert len(said) == 1 and "offline" in said[0]
    (folder,) = offline_folders(tmp_path)
    first = read_offline(folder)
    assert first["exit_code"] == 1
    assert [row["train/step"] for row in first["rows"]] == list(range(1, 8))
    assert first["rows"][2]["reward/mean"] == 0.3 and first["rows"][2]["eval/mean"] == 0.5
    assert ("*", "train/step") in first["metrics"]
    assert first["config"]["reward"] == {"kwargs": {"max_tokens": 5}} and first["id"] == tracker.ids["wandb"]
    assert all(b"hunter2" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    files = {path.name for path in (folder / "files").iterdir()}
    assert "output.log" not in files and "wandb-metadata.json" not in files and "code" not in files

    with open_loggers(config(wandb=True), tmp_path, {"name": "x"}, tracker.ids, 5, said.append) as resumed:
        assert [row["step"] for row in resumed.history] == [1, 2, 3, 4, 5]
        for step in range(6, 11):
            resumed.log(step, {"reward/mean": step / 10})
    assert resumed.ids == tracker.ids
    assert steps_of(tmp_path / "metrics.jsonl") == list(range(1, 11))
    assert [row["step"] for row in resumed.history] == list(range(1, 11))
    (other,) = set(offline_folders(tmp_path)) - {folder}
    second = read_offline(other)
    assert second["id"] == first["id"] and second["exit_code"] == 0
    assert [row["train/step"] for row in second["rows"]] == list(range(6, 11))


def test_wandb_without_a_key_is_offline_and_asks_nothing(fresh_wandb: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked for a login"))
    monkeypatch.setattr("getpass.getpass", lambda *_: pytest.fail("asked for a login"))
    mode, why = wandb_mode()
    assert mode == "offline" and "no API key" in why


def test_wandb_without_network_is_offline(fresh_wandb: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # not listening: connections are refused
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        mode, why = wandb_mode()
        assert mode == "offline" and "cannot be reached" in why
        server.listen()
        assert wandb_mode() == ("online", "")
        monkeypatch.delenv("WANDB_API_KEY")
        (tmp_path / "netrc").write_text(f"machine 127.0.0.1:{server.getsockname()[1]} login user password {'a' * 40}\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        assert wandb_mode() == ("online", "")


def test_a_server_that_fails_ends_in_an_offline_run(
    fresh_wandb: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rl.tracking, "wandb_mode", lambda: ("online", ""))
    monkeypatch.setattr(rl.tracking, "INIT_TIMEOUT_S", 0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        said: list[str] = []
        with open_loggers(config(wandb=True), tmp_path, {}, {}, 0, said.append) as tracker:
            tracker.log(1, {"a": 1.0})
    assert len(said) == 1 and "could not start online" in said[0], said
    (folder,) = offline_folders(tmp_path)
    assert read_offline(folder)["rows"][0]["a"] == 1.0 and read_offline(folder)["exit_code"] == 0


def test_wandb_disabled_imports_nothing_and_keeps_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise
    said: list[str] = []
    with open_loggers(config(wandb=True), tmp_path, {}, {"wandb": "abc"}, 0, said.append) as tracker:
        tracker.log(1, {"a": 1.0})
    assert said == [] and tracker.ids == {"wandb": "abc"} and not (tmp_path / "wandb").exists()
    assert steps_of(tmp_path / "metrics.jsonl") == [1]


def test_a_broken_wandb_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    said: list[str] = []
    with open_loggers(config(wandb=True), tmp_path, {}, {}, 0, said.append) as tracker:
        tracker.log(1, {"a": 1.0})
    assert len(said) == 1 and said[0].startswith("W&B: not used")
    assert steps_of(tmp_path / "metrics.jsonl") == [1]


class Broken:
    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.calls = 0

    def log(self, step: int, metrics: Any) -> None:
        self.calls += 1
        raise self.error

    def finish(self, exit_code: int) -> None:
        self.calls += 1
        raise self.error


def test_a_logger_that_fails_later_is_dropped_with_one_warning() -> None:
    said: list[str] = []
    broken = Broken(ConnectionError("service\nis gone"))
    guarded = rl.tracking.Guarded("W&B", broken, said.append)
    guarded.log(1, {})
    guarded.log(2, {})
    guarded.finish(0)
    assert broken.calls == 1 and said == ["W&B: logging stopped: ConnectionError: service is gone"]


def test_every_logger_is_finished_when_one_fails() -> None:
    class Noted:
        codes: list[int]

        def __init__(self) -> None:
            self.codes = []

        def log(self, step: int, metrics: Any) -> None: ...

        def finish(self, exit_code: int) -> None:
            self.codes.append(exit_code)

    noted = Noted()
    tracker = rl.tracking.Tracker(loggers=[Broken(OSError("disk")), noted])
    with pytest.raises(OSError, match="disk"):
        tracker.finish(3)
    tracker.finish(0)
    assert noted.codes == [3]


def test_ctrl_c_while_a_logger_opens_closes_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    def open_jsonl(*arguments: Any) -> JsonlLogger:
        opened.append(JsonlLogger(*arguments))
        return opened[0]

    opened: list[JsonlLogger] = []
    monkeypatch.setattr(rl.tracking, "WandbLogger", interrupted)
    monkeypatch.setattr(rl.tracking, "JsonlLogger", open_jsonl)
    with pytest.raises(KeyboardInterrupt):
        open_loggers(config(wandb=True), tmp_path, {}, {}, 0)
    assert opened[0].file.closed


def test_exit_codes() -> None:
    cases = [(None, 0), (RuntimeError(), 1), (KeyboardInterrupt(), 130), (SystemExit(), 0), (SystemExit(3), 3)]
    assert [exit_code_of(error) for error, _ in cases] == [code for _, code in cases]
    assert exit_code_of(SystemExit("message")) == 1


def test_jsonl_is_flushed_strict_and_cut_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.log(0, {"eval/mean": 0.1})
    logger.log(1, {"a": math.nan})
    assert path.read_text().splitlines()[1].endswith('"a": null}')  # before any close
    logger.log(2, {"a": 2.0})
    logger.finish(0)
    with path.open("a") as file:
        file.write('{"step": 3, "ti')  # killed while writing
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2] and math.isnan(read_metrics(path)[1]["a"])
    JsonlLogger(path, resumed_step=1).finish(0)
    assert steps_of(path) == [0, 1]
    JsonlLogger(path, resumed_step=0).finish(0)
    assert steps_of(path) == []


def test_tensorboard_files_hold_the_steps(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resumed_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with open_loggers(config(tensorboard=True), tmp_path, {}, {}, resumed_step) as tracker:
            for step in steps:
                tracker.log(step, {"reward/mean": float(step)})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "key",
    ["api_key", "WANDB_API_KEY", "apiKey", "hf_token", "token", "password", "db-password", "secret", "client_secret",
     "key", "aws_access_key_id", "private_key", "credentials", "auth_token", "openai.api_key"],
)  # fmt: skip
def test_secrets_are_removed(key: str) -> None:
    assert without_secrets({"a": [{key: "x", "b": 1}]}) == {"a": [{"b": 1}]}


def test_what_only_sounds_like_a_secret_stays() -> None:
    import dataclasses

    from conf.schema import Config

    resolved = dataclasses.asdict(Config())
    assert without_secrets(resolved) == resolved
    kept = {
        "max_tokens": 1,
        "prompt_key": "q",
        "pad_token": "<pad>",
        "eos_token_id": 2,
        "tokenizer": "t",
        "author": "a",
    }
    assert without_secrets(kept) == kept
    assert without_secrets({"url": "https://me:pass@host/x"}) == {"url": "https://host/x"}
