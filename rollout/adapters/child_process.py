"""Programs that an episode runs: ended with it, together with all that they have started."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psutil

MAX_LINE_BYTES = 64 << 20
GRACE_S = 2.0


@contextlib.asynccontextmanager
async def running(
    command: list[str], env: dict[str, str] | None = None, *, talks: bool
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The program as a process, which is ended with all below it.

    It stays in our process group: whoever kills the process of this environment kills the program too.
    talks: over its stdin and stdout, and takes the end of its stdin as its own; else it has SIGTERM for that.
    """
    pipe = asyncio.subprocess.PIPE
    stdin, stdout = (pipe, pipe) if talks else (asyncio.subprocess.DEVNULL, 2)
    process = await asyncio.create_subprocess_exec(*command, stdin=stdin, stdout=stdout, env=env, limit=MAX_LINE_BYTES)
    try:
        yield process
    finally:
        below = descendants(process.pid)
        if process.stdin:
            process.stdin.close()
        elif process.returncode is None:
            process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended(process), GRACE_S)
        for found in [*descendants(process.pid), *below]:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.kill()
        if process.returncode is None:
            process.kill()
            await ended(process)
        process._transport.close()  # type: ignore[attr-defined]  # else it waits for whoever else holds the pipes


async def ended(process: asyncio.subprocess.Process) -> None:
    """Not `process.wait()`, which waits for the end of the pipes too, and children may hold them."""
    while process.returncode is None:
        await asyncio.sleep(0.02)


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
