"""The Ray cluster of a run: started here (and then stopped here) or joined; resources checked before anything waits."""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from conf.choices import Device
from conf.schema import ClusterConfig
from rl.faults import ResourceError
from rl.memory import RUN_MARK

LONGEST_TEMPORARY_ROOT = 24
OBJECT_STORE_BYTES = 512 << 20
JOIN_TIMEOUT_S = 10.0
# Freed memory stays in the process, in huge pages: first touch of new memory costs ten times a copy, and a training
# step frees and takes gigabytes. Measured on SmolLM2: a step of 14.2 s becomes 10.8 s.
KEEP_MEMORY = (
    "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=100000000000:"
    "glibc.malloc.top_pad=268435456:glibc.malloc.hugetlb=1"
)


def detect_device(cfg: ClusterConfig) -> str:
    """cpu or cuda: what the configuration says, or what PyTorch sees on this machine."""
    if cfg.device is Device.auto:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return cfg.device.value


class Cluster:
    """Ray for one run. Everything it starts carries the environment variable TANDEM_RUN_ID, and ends with `stop`."""

    def __init__(self, cfg: ClusterConfig):
        self.device = detect_device(cfg)
        self.cores = os.cpu_count() or 1
        self._places: dict[str, Any] = {}
        self.run_id = secrets.token_hex(6)
        self.own = cfg.address is None
        self.folder = temporary_root() / f"tandem-{self.run_id}"
        self.folder.mkdir(mode=0o700)
        os.environ[RUN_MARK] = self.run_id
        self._reaper = start_reaper(self.run_id, self.folder)
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            self._connect(cfg.address)
        except BaseException:
            self.stop()
            raise
        finally:
            # Ray's own handler aborts the process three seconds after SIGTERM, in the middle of its cleaning up.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_sigterm)

    def _connect(self, address: str | None) -> None:
        """Starts Ray on this machine, or joins the cluster at `address`. Raises ResourceError."""
        settings: dict[str, Any] = {"address": address}
        what = f"cluster.address={address}: no Ray cluster can be joined there"
        if self.own:
            what = "Ray could not be started on this machine"
            settings = {
                "num_cpus": self.cores,
                "include_dashboard": False,
                "_temp_dir": str(self.folder),
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        try:
            if address is not None and (place := re.fullmatch(r"([^:/]+):(\d+)", address)):
                # Ray itself would knock for a quarter of an hour.
                socket.create_connection((place[1], int(place[2])), timeout=JOIN_TIMEOUT_S).close()
            ray.init(**settings, namespace=self.run_id, log_to_driver=False, logging_level="error")
        except Exception as error:  # by the cause: ConnectionError, RuntimeError, ValueError, OSError, Exception itself
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            raise ResourceError(f"{what}: {reason[0]}") from error

    def require(self, wanted: dict[str, float]) -> None:
        """Raises ResourceError when the cluster as a whole has less than `wanted`, listing both."""
        have = ray.cluster_resources()
        short = {k: v for k, v in wanted.items() if v > have.get(k, 0.0)}
        if short:
            rows = "\n  ".join(f"{k}: wanted {wanted[k]:g}, available {have.get(k, 0.0):g}" for k in wanted)
            raise ResourceError(
                f"the Ray cluster cannot hold this run:\n  {rows}\nLower cluster.train_ranks "
                "or cluster.rollout_engines "
                "(or cluster.cpus_per_rank, cpus_per_engine, gpus_per_rank, gpus_per_engine), or join a larger cluster "
                "(cluster.address)"
            )

    def reserve(
        self, role: str, bundles: Sequence[tuple[float, float]], timeout_s: float = 60.0
    ) -> Callable[[int], Any]:
        """Reserves (cpus, gpus) for each member of a role; gives member number -> scheduling strategy."""
        wanted = [{k: v for k, v in (("CPU", cpus), ("GPU", gpus)) if v > 0} for cpus, gpus in bundles]
        if not all(wanted):
            return lambda _: None
        group = placement_group(wanted, name=f"{self.run_id}-{role}")
        if not group.wait(timeout_s):
            raise ResourceError(
                f"{role}: no place for {wanted} within {timeout_s:g} s; free now: {ray.available_resources()}"
            )
        self._places[role] = group
        return lambda member: PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=member)

    def release(self, role: str) -> None:
        """Gives back what `reserve` holds for a role, if anything: its processes have ended."""
        place = self._places.pop(role, None)
        if place is not None:
            remove_placement_group(place)

    def actor_env(self, threads: int) -> dict[str, str]:
        """Environment of a worker process; it must be set before the process imports torch."""
        env = {
            RUN_MARK: self.run_id,
            "TMPDIR": str(self.folder),  # what libraries leave behind goes with the run's folder
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # two pools share the cores, and only one of them works at a time
            "TORCHDYNAMO_DISABLE": "1" if self.device == "cpu" else "0",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if self.device == "cpu":
            env["GLIBC_TUNABLES"] = KEEP_MEMORY
        return env | ({"GLOO_SOCKET_IFNAME": "lo"} if self.own else {})

    def host_of(self, actor: Any) -> str:
        """Address under which the members of a group reach this actor's host."""
        if self.own:
            return "127.0.0.1"
        address: str = ray.get(actor.__ray_call__.remote(lambda _: ray.util.get_node_ip_address()), timeout=60)
        return address

    def save_logs(self, target: Path) -> None:
        """Copies the workers' output into `target`; what cannot be written there, on a full disk, is left out."""
        for source in sorted(self.folder.glob("session_2*/logs/worker-*.[eo][ru][rt]")):
            if source.stat().st_size:
                with contextlib.suppress(OSError):
                    target.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, target / source.name)

    def stop(self) -> None:
        """Ends what this run started; a cluster that it joined survives. Idempotent."""
        ray.shutdown()
        os.environ.pop(RUN_MARK, None)
        if self._reaper.stdin and not self._reaper.stdin.closed:
            self._reaper.stdin.close()
            self._reaper.wait(timeout=30)


def temporary_root() -> Path:
    """Where temporary folders go: /tmp when that path is long, as socket paths have at most 107 bytes."""
    usual = Path(tempfile.gettempdir())
    return usual if len(str(usual)) <= LONGEST_TEMPORARY_ROOT else Path("/tmp")


def start_reaper(run_id: str, folder: Path) -> "subprocess.Popen[bytes]":
    """Starts the process that cleans up when this one ends, in whatever way (see actors/reaper.py)."""
    env = {k: v for k, v in os.environ.items() if k != RUN_MARK}
    script = Path(__file__).with_name("reaper.py")
    return subprocess.Popen(
        [sys.executable, "-S", "-E", str(script), f"{RUN_MARK}={run_id}", str(folder)],
        stdin=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
