"""One training run: checks everything, starts everything, trains, leaves nothing behind. See scripts/train.py."""

import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from actors.checkpoint import list_checkpoints, publish
from actors.cluster import Cluster, detect_device
from actors.group import RankGroup
from actors.resume import Start, resolve_start
from actors.roles import ActorPolicy, ActorReference
from conf.launch import to_dict, to_yaml
from conf.schema import Config
from rl.batching import NoValidTrajectories, in_one_line
from rl.faults import CheckpointError, ResourceError, RoleError, SyncError
from rl.live import View, open_view
from rl.loop import run as run_loop
from rl.memory import start_peak
from rl.numerics import MismatchError, NotFiniteError
from rl.plan.memory import memory_line, promised_bytes
from rl.prompts import PromptStream
from rl.roles import Metrics, Roles
from rl.run_folder import write_config, write_json, write_versions
from rl.sampling import is_settled
from rl.summary import build_summary, final_table, plot_reward
from rl.timing import make_timer
from rl.tracking import Tracker, keep_steps, open_loggers
from rl.types import Group, RunState
from rollout.engines import EngineGroup
from rollout.evaluate import evaluate
from rollout.pool import RolloutPool
from rollout.preflight.launch import (
    Prepared,
    prepare,
    require_channel,
    require_compilers,
    require_disk,
    require_engine_device,
    require_memory,
    require_own_folder,
    require_version_room,
)
from rollout.record import describe_rollout
from rollout.turns import Turns
from scripts.sft import warm_start
from scripts.wiring import KINDS, connect_sync, make_groups, make_player, role_paths, start_in_turn
from weightsync.channels.disk import remove_left
from weightsync.folder import own_shapes
from weightsync.plan import PlanError

ROLLOUTS = "rollouts.jsonl"  # in the run folder
COUNTED = ("tokens_sampled", "tokens_trained", "trajectories_failed")  # of the run state, since the first step

# Errors that a user can act on from the message alone: shown without a traceback.
PLAIN_ERRORS = (
    RoleError,
    SyncError,
    CheckpointError,
    ResourceError,
    MismatchError,
    NotFiniteError,
    NoValidTrajectories,
    PlanError,
)


def train(cfg: Config) -> int:
    """Runs the configuration to its end. Returns the exit code; raises ConfigError before anything has started."""
    prepared = prepare(cfg)
    config = to_dict(cfg)
    require_disk(cfg, prepared.shapes)
    require_memory(cfg, prepared.shapes, prepared.model, detect_device(cfg.cluster))
    require_compilers(cfg, detect_device(cfg.cluster))
    require_channel(cfg, detect_device(cfg.cluster))
    require_engine_device(cfg.rollout, detect_device(cfg.cluster))
    start = resolve_start(cfg, config, prepared.shapes)
    state = RunState(**start.manifest.get("run_state", {}))
    console = Console()
    if state.step >= cfg.num_steps:
        console.print(
            f"{start.run_dir}: already finished at step {state.step} (num_steps={cfg.num_steps}); nothing to do"
        )
        return 0
    require_own_folder(cfg, start.run_dir)
    require_version_room(cfg, prepared.shapes, prepared.model, cfg.num_steps - state.step + 1)
    write_config(start.run_dir, to_yaml(cfg))
    write_versions(start.run_dir)
    (start.run_dir / "summary.json").unlink(missing_ok=True)
    with (
        open_view(cfg.num_steps, name=cfg.name, live=cfg.tracking.live, console=console) as view,
        terminated_as_exit(),
    ):
        for line in [*start.messages, *prepared.warnings]:
            view.message(line)
        keep_steps(start.run_dir / ROLLOUTS, state.step)
        view.message(f"run folder {start.run_dir}" + (f", resuming at step {state.step}" if state.step else ""))
        with open_loggers(cfg.tracking, start.run_dir, config, state.tracking_ids, state.step, view.message) as tracker:
            state.tracking_ids = dict(tracker.ids)
            session = Session(cfg, prepared, start, state, tracker, view)
            return session.run()


class Session:
    """One run from cluster start to summary: owns what it starts, in one ExitStack."""

    def __init__(self, cfg: Config, prepared: Prepared, start: Start, state: RunState, tracker: Tracker, view: View):
        self.cfg, self.prepared, self.start = cfg, prepared, start
        self.state, self.tracker, self.view = state, tracker, view
        self.phases: dict[str, float] = {}
        self.timer = make_timer(self.phases, self._phase)
        self.turns: Turns | None = None
        self.measured_step = min(state.step + 2, cfg.num_steps)  # by then optimizer states exist
        self.begun = time.monotonic()
        self.failure_shown = False
        # The present reference, once it is no longer the model that training started from.
        kept = start.checkpoint / "reference" if start.checkpoint else None
        self.reference_folder = kept if kept is not None and state.reference_step > 0 else None

    def run(self) -> int:
        """Trains; writes summary.json whatever happens. Returns the exit code."""
        status, error, code = "finished", None, 0
        peak = None
        with ExitStack() as stack:
            try:
                if self.cfg.sync.folder is not None:
                    stack.callback(remove_left, Path(self.cfg.sync.folder))  # when the ranks have ended
                cluster = self._start_cluster(stack)
                peak = start_peak(cluster.run_id)
                stack.callback(peak.stop)
                self._train(cluster, stack)
            except (KeyboardInterrupt, SystemExit) as stop:
                status, error = "interrupted", type(stop).__name__
                code = 143  # Ray's own handler of SIGTERM gives another
                if isinstance(stop, KeyboardInterrupt):
                    code = 130
                elif stop.code == 129:
                    code = 129
                self.view.message("interrupted: stopping actors and removing temporary files")
            except PLAIN_ERRORS as failure:
                status, error, code = "failed", str(failure), 1
            except BaseException as failure:
                notes = getattr(failure, "__notes__", [])  # which rank it comes from
                status, error = "failed", "; ".join([f"{type(failure).__name__}: {failure}", *notes])
                if not self._is_of_run_dir(failure):
                    raise
                error, code = f"the run folder cannot be written any more: {failure}", 1
            finally:
                wall_s = self.state.wall_s + time.monotonic() - self.begun
                summary = build_summary(
                    self.tracker.history,
                    status=status,
                    wall_s=wall_s,
                    peak_rss_bytes=peak.stop() if peak else None,
                    error=error,
                )
                self._write("summary.json", lambda path: write_json(path, summary))
        self.view.close()
        self._write("reward.png", lambda path: plot_reward(self.tracker.history, path))
        self.view.console.print(final_table(summary))
        if code == 1:
            print(f"error: {error}\nlogs of the actors: {self.start.run_dir / 'logs'}", file=sys.stderr)
            saved = list_checkpoints(self.start.run_dir / "checkpoints")
            if saved:
                print(f"the same command with run_dir={self.start.run_dir} continues from {saved[-1]}", file=sys.stderr)
        self.tracker.finish(code)
        return code

    def _is_of_run_dir(self, failure: BaseException) -> bool:
        """Whether it says that a file of the run folder cannot be written: removed, say, or on a disk that has gone."""
        return isinstance(failure, OSError) and str(failure.filename or "").startswith(str(self.start.run_dir))

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        """Writes a closing record. A full disk costs that record, and not the message of what has ended the run."""
        try:
            write(self.start.run_dir / name)
        except OSError as error:
            self.view.message(f"{name} could not be written: {error}")

    def _start_cluster(self, stack: ExitStack) -> Cluster:
        cfg = self.cfg.cluster
        with self.view.phase("start cluster"):
            cluster = Cluster(cfg)
            stack.callback(cluster.stop)
            stack.callback(cluster.save_logs, self.start.run_dir / "logs")
            on_gpu = detect_device(cfg) == "cuda"
            ranks = cfg.train_ranks * len([r for r in role_paths(self.cfg, "") if r not in cfg.colocate])
            engines = sum(self.cfg.engine_workers(i) for i in range(cfg.rollout_engines))
            cluster.require(
                {
                    "CPU": ranks * cfg.cpus_per_rank + cfg.rollout_engines * cfg.cpus_per_engine,
                    "GPU": ranks * cfg.gpus_per_rank + engines * cfg.gpus_per_engine if on_gpu else 0.0,
                }
            )
        return cluster

    def _train(self, cluster: Cluster, stack: ExitStack) -> None:
        cfg, prepared = self.cfg, self.prepared
        model_path = self._warm_start(cluster)
        self.groups = make_groups(cfg, cluster, role_paths(cfg, model_path, self.reference_folder))
        with self.view.phase("load models"):
            engines = EngineGroup(cfg, cluster, model_path)
            stack.callback(engines.stop)
            for group in self.groups.values():
                stack.callback(group.stop)
            # Roles of one process start one after another, processes side by side.
            started = start_in_turn(self.groups)
            if cfg.cluster.sleep:
                started.result()
                for group in self._owned():
                    group.rest()
            for ready in [started, engines.start()]:
                ready.result()
        if cfg.cluster.sleep:
            self.turns = Turns(self._owned(), engines)
        self.policy = ActorPolicy(cfg, self.groups["policy"])
        self.model_path = model_path
        if self.start.checkpoint:
            with self._phase("load checkpoint"):
                for group in self._trained():
                    group.call("load", str(self.start.checkpoint))
        self.sync = sync = connect_sync(cfg, self.policy, engines, len(prepared.tokenizer), self.view.message)
        player = make_player(cfg, prepared, stack)
        stream = PromptStream(prompts=prepared.train, seed=cfg.seed, shuffle=cfg.data.shuffle)
        self.pool = RolloutPool(
            cfg,
            engines.handles,
            stream,
            player,
            prepared.stop_token_ids,
            partial(is_settled, cfg.algo, self.state.pass_rates),
        )
        stack.callback(self.pool.close)
        sync.on_failure = self.pool.abort
        made = {role: KINDS[role](cfg, group) for role, group in self.groups.items() if role in KINDS}
        if cfg.algo.has_reference and cfg.lora.rank > 0:
            made["reference"] = ActorReference(cfg, self.groups["policy"], "base_logprobs")
        self.reference: ActorReference | None = made.get("reference")
        roles = Roles(policy=self.policy, rollouts=self.pool, sync=sync, **made)
        try:
            run_loop(cfg, roles, self.state, self.timer, self._before_first, self._after_step)
        except NoValidTrajectories as error:
            self._write_samples(self.state.step + 1, error.groups)
            raise
        if cfg.checkpoint.at_end and self.state.step % (cfg.checkpoint.every or self.state.step + 1):
            self._save()
        if cfg.checkpoint.export:
            with self._phase("export"):
                self.groups["policy"].call("export", str(self.start.run_dir / "hf"), model_path)
                if cfg.lora.rank > 0:
                    self.groups["policy"].call("export_adapter", str(self.start.run_dir / "adapter"), model_path)

    def _warm_start(self, cluster: Cluster) -> str:
        """The model folder that the policy starts from: model.path, or the warm start's, made once in this run."""
        if self.cfg.sft.num_steps == 0:
            return self.cfg.model.path
        base = self.start.manifest.get("base")
        if base is not None and Path(base).is_dir():  # what the checkpoint was trained on
            return str(base)
        out = self.start.run_dir / "sft"
        config = to_dict(self.cfg)
        made_from = {key: config[key] for key in ("sft", "data", "model", "seed")} | {
            "dtype": config["trainer"]["dtype"]
        }
        stamp = out / "tandem_sft.json"
        if not stamp.exists() or json.loads(stamp.read_text()) != made_from:
            with self.view.phase("warm start"):
                result = warm_start(self.cfg, cluster, self.prepared, out, self.view.message)
            write_json(stamp, made_from)
            self.view.message(f"warm start: loss {result['sft/loss']:.3f} in {result['sft/seconds']:.0f} s")
        return str(out)

    def _before_first(self) -> None:
        """Evaluates the policy that training starts from."""
        if self.cfg.evaluation.every and self.state.step == 0:
            metrics = self._evaluate()
            write_json(self.start.run_dir / "evaluation_000000.json", metrics)
            self.tracker.log(0, {k: v for k, v in metrics.items() if isinstance(v, float)})
        if self.state.step + 1 == self.measured_step:
            self._measure(on=True)
        self.phases.clear()

    def _after_step(self, state: RunState, groups: list[Group], metrics: Metrics) -> None:
        """Evaluates and saves when due, then logs the step."""
        cfg, step = self.cfg, state.step
        times = {f"time/{name}_s": seconds for name, seconds in self.phases.items()}
        metrics |= times | {"time/step_s": sum(times.values())}
        metrics["rollout/tok_s"] = metrics["rollout/num_tokens"] / max(1e-9, self.phases.get("rollout", 0.0))
        metrics |= {f"run/{name}": float(getattr(state, name)) for name in COUNTED}
        if step + 1 == self.measured_step:
            self._measure(on=True)
        elif step == self.measured_step:
            metrics |= self._memory()
            self._measure(on=False)
        last = step == cfg.num_steps
        if cfg.evaluation.every and (last or step % cfg.evaluation.every == 0):
            evaluation = self._evaluate()
            write_json(self.start.run_dir / f"evaluation_{step:06d}.json", evaluation)
            metrics |= {k: v for k, v in evaluation.items() if isinstance(v, float)}
        if cfg.algo.reference_refresh and step % cfg.algo.reference_refresh == 0:
            self._refresh_reference()
        self._write_samples(step, groups)
        self.tracker.log(step, metrics)
        if cfg.checkpoint.every and step % cfg.checkpoint.every == 0:
            self._save()
        self.view.step(step, metrics)
        self.phases.clear()

    def _evaluate(self) -> dict[str, object]:
        """Held-out prompts, sampled and greedy, with the weights that were last pushed."""
        self.sync.settle()
        with self._phase("evaluate"):
            return evaluate(self.cfg, self.pool, self.prepared.held_out, self.prepared.stop_token_ids)

    def _refresh_reference(self) -> None:
        """Has the reference take the policy's weights, which checkpoints from now on keep beside their own."""
        assert self.reference is not None
        with self._phase("refresh reference"):
            folder = self.start.run_dir / "reference"
            self.groups["policy"].call("export", str(folder), self.model_path)
            self.reference.reload(folder)
            self.reference_folder, self.state.reference_step = folder, self.state.step

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Shown in the view; who sleeps in it, sleeps before it begins."""
        if self.turns is not None:
            started = time.monotonic()
            self.turns.begin(name)
            self.phases["turns"] = self.phases.get("turns", 0.0) + time.monotonic() - started
        with self.view.phase(name):
            yield

    def _owned(self) -> list[RankGroup]:
        """One group for each training process."""
        return [group for group in self.groups.values() if group.owned]

    def _measure(self, on: bool) -> None:
        """Whether the next step's calls note the memory of their ranks: one step of a run, as it costs time."""
        for group in self._owned():
            group.measure(on)

    def _memory(self) -> Metrics:
        """What each rank holds and held at most in the measured step, told beside what its layout promises."""
        metrics: Metrics = {}
        for role, group in self.groups.items():
            found = group.memory()
            promised = promised_bytes(self.cfg, role, own_shapes(Path(group.model_path)), group.cluster.device)
            metrics |= {f"memory/{role}_{name}": float(count) for name, count in found.items()}
            metrics[f"memory/{role}_promised_bytes"] = promised.weights + promised.master + promised.moments
            self.view.message(f"memory of {role} ranks, {memory_line(group.layout.label(), found, promised)}")
        return metrics

    def _trained(self) -> list[RankGroup]:
        """The groups whose state a checkpoint holds."""
        return [self.groups[role] for role in ("policy", "critic") if role in self.groups]

    def _write_checkpoint(self, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Has all trained ranks write their shards into `folder`; gives manifest entries and further fields."""
        entries: list[dict[str, Any]] = []
        roles: dict[str, Any] = {}
        for group in self._trained():
            for written in group.call("save", str(folder)):
                entries += written
            roles[group.role] = group.call("state")[0]
        return entries, {"roles": roles, "base": str(Path(self.model_path).absolute())}

    def _save(self) -> None:
        with self._phase("save"):
            state = dataclasses.replace(self.state, wall_s=self.state.wall_s + time.monotonic() - self.begun)
            saved = publish(
                self.start.run_dir / "checkpoints",
                self.state.step,
                self._write_checkpoint,
                dataclasses.asdict(state),
                to_dict(self.cfg),
                Path(self.model_path),
                self.cfg.checkpoint.keep,
                self.reference_folder,
            )
            if self.reference_folder is not None:  # the older checkpoint that held it may be gone by now
                self.reference_folder = saved / "reference"

    def _write_samples(self, step: int, groups: list[Group]) -> None:
        """A few rollouts of the step, with what went wrong in it, to rollouts.jsonl."""
        trajectories = [(g, t) for g in groups for t in g.trajectories]
        failed = [pair for pair in trajectories if not pair[1].valid]
        if failed and not self.failure_shown:
            self.failure_shown, (_, first) = True, failed[0]
            told = f"{first.status.value}): {in_one_line(first.error)}"
            self.view.message(f"a sample failed ({told}; this and further ones: {ROLLOUTS}")
        every = max(1, len(trajectories) // max(1, self.cfg.tracking.samples_per_step))
        shown = failed[:4] + trajectories[::every][: self.cfg.tracking.samples_per_step]
        with (self.start.run_dir / ROLLOUTS).open("a", encoding="utf-8", errors="replace") as file:
            for group, t in shown:
                row = describe_rollout(step, group, t, self.prepared.tokenizer)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


@contextmanager
def terminated_as_exit() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that has gone, unwind like an exception, so that everything is stopped.

    Codes 143 and 129.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
