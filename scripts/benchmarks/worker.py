"""The process of a yardstick: makes one object and runs its methods as told over a pipe, until that closes."""

import importlib
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any


def main(fd: int, target: str) -> None:
    channel = Connection(fd)

    def reply(succeeded: bool, value: Any) -> None:
        channel.send_bytes(pickle.dumps((succeeded, value)))

    module, _, name = target.partition(":")
    try:
        subject = getattr(importlib.import_module(module), name)(*pickle.loads(channel.recv_bytes()))
    except Exception:
        reply(False, traceback.format_exc())
        return
    reply(True, None)
    while True:
        try:
            method, args = pickle.loads(channel.recv_bytes())
        except EOFError:
            return
        try:
            reply(True, getattr(subject, method)(*args))
        except Exception:
            reply(False, traceback.format_exc())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
