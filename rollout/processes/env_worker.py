"""The process that runs environments: one at a time, its methods in the main thread, one request after another.

Imports nothing heavy. Requests are a number and a pickled (method, args), "close" among them, which ends the episode;
the next request constructs the next environment. Replies are the same number and JSON [kind, value].
"""

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import signal
import socket
import traceback
from typing import Any

from conf.errors import ConfigError
from conf.imports import check_arguments, import_function
from rollout.environment import EnvironmentFailure
from rollout.processes.env_faults import EnvBadValue
from rollout.processes.env_values import CHECKS, plain, shown
from rollout.processes.worker import ERROR_CHARS, NUMBER, die_with_parent, receive, send

KEY = "env._target_"
OPTIONAL = ("make_task", "score", "oracle", "snapshot", "restore")
RUN = "run"  # of an agent, which has it in place of reset and step
# Kinds of reply. The first two answer the start, the others a request.
READY, REFUSED, VALUE, BAD_VALUE, RAISED, FAILED = "ready", "refused", "value", "bad_value", "raised", "failed"


def import_environment(target: str, kwargs: dict[str, Any]) -> Any:
    """The class at `target`. Raises ConfigError unless it looks like an environment, or agent, that takes `kwargs`."""
    found = import_function(target, KEY)
    wrong = [name for name in ("reset", "step") if not callable(getattr(found, name, None)) and not is_agent(found)]
    if wrong:
        what = "a class" if inspect.isclass(found) else f"a {type(found).__name__}"
        raise ConfigError(
            f"{KEY}={target}: is {what} without the method{'s' * (len(wrong) > 1)} {' and '.join(wrong)}; an "
            "environment is a class with reset(task) and step(action), an agent one with run(task, base_url, model)"
        )
    if not inspect.isclass(found):
        raise ConfigError(f"{KEY}={target}: is a {type(found).__name__}, not a class")
    for name in ("close", *OPTIONAL):
        if not callable(getattr(found, name, import_environment)):
            raise ConfigError(f"{KEY}={target}: {name} must be a method, found {shown(getattr(found, name))}")
    check_arguments(found, KEY, target, **kwargs)
    return found


def is_agent(found: Any) -> bool:
    """Whether a class runs whole episodes. One with reset or step is an environment, whatever its `run` may be."""
    return callable(getattr(found, RUN, None)) and not hasattr(found, "reset") and not hasattr(found, "step")


def optional_methods(found: Any) -> list[str]:
    """The methods that a class has beyond those that every environment has; `run` among them where it is an agent."""
    return [name for name in OPTIONAL if hasattr(found, name)] + [RUN] * is_agent(found)


def serve(fd: int, parent: int) -> None:
    """Answers requests on socket `fd` until its other end closes; dies with process `parent`. 0: in a sandbox."""
    die_with_parent(parent)
    channel = socket.socket(fileno=fd)
    target, kwargs = pickle.loads(receive(channel))
    try:
        environment = import_environment(target, kwargs)
    except ConfigError as error:
        _reply(channel, REFUSED, str(error))
        os._exit(0)
    _reply(channel, READY, optional_methods(environment))
    current: Any = None
    with asyncio.Runner() as runner:  # one loop for the process: an async environment may keep a client
        while True:
            try:
                request = receive(channel)
            except (EOFError, OSError):
                os._exit(0)  # not a normal exit, which would wait for threads that the environment left behind
            kind, value = RAISED, None
            try:
                method, args = pickle.loads(request[NUMBER.size :])
                if current is None and method != "close":
                    current = environment(**kwargs)
                kind, value = VALUE, _call(current, method, args, runner)
            except EnvBadValue as error:
                kind, value = BAD_VALUE, str(error)
            except BaseException as error:  # SystemExit of an environment is an answer too, not the end of the worker
                kind = FAILED if isinstance(error, EnvironmentFailure) else RAISED
                value = trace(error)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left set must not hit the next call
            if method == "close":
                current = None
                if not parent:
                    end_others()
            _reply(channel, kind, value, request[: NUMBER.size])


def _call(current: Any, method: str, args: tuple[Any, ...], runner: asyncio.Runner) -> Any:
    bound = getattr(current, method, None)
    if bound is None and method == "close":
        return None
    if bound is None:
        raise AttributeError(f"{type(current).__name__} has no method {method}")
    value = bound(*args)
    if inspect.isawaitable(value):
        value = runner.run(finish(value))
    return plain(CHECKS[method](value))


def end_others() -> None:
    """In a sandbox: every process that an episode left behind there, this one and the first excepted by the kernel."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


async def finish(value: Any) -> Any:
    return await value


def trace(error: BaseException) -> str:
    """The traceback, from the first frame on that is not ours."""
    here = os.path.dirname(__file__)
    ours = (here, os.path.dirname(here), os.path.dirname(asyncio.__file__))
    frames = error.__traceback__
    while frames and os.path.dirname(frames.tb_frame.f_code.co_filename) in ours:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))[-ERROR_CHARS:]


def _reply(channel: socket.socket, kind: str, value: Any, number: bytes = b"") -> None:
    send(channel, number + json.dumps([kind, value]).encode())
