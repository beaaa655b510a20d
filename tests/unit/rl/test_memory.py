import os
import subprocess
import sys

import pytest

from rl.memory import RUN_MARK, start_peak, tree_bytes

MEGABYTE = 1_000_000
CHILD = "x = bytearray(b'1') * 80_000_000; print('ready', flush=True); input()"


def test_marked_processes_count_and_others_do_not() -> None:
    pytest.importorskip("psutil")
    mine, other = "test-run-mine", "test-run-other"
    alone = tree_bytes(mine)
    assert alone > 5 * MEGABYTE
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env={**os.environ, RUN_MARK: mine},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        peak = start_peak(mine, interval_s=60)
        assert peak.peak_bytes - alone > 70 * MEGABYTE
        assert tree_bytes(other) < alone + 40 * MEGABYTE
        assert any(pid == child.pid for pid, _ in peak.known)
    finally:
        child.communicate("\n", timeout=10)
    after = peak.sample()
    assert after < peak.peak_bytes - 70 * MEGABYTE
    assert all(pid != child.pid for pid, _ in peak.known)
    thread = peak.thread
    assert peak.stop() == peak.peak_bytes > alone + 70 * MEGABYTE
    assert thread is not None and not thread.is_alive()
    assert peak.stop() == peak.peak_bytes
