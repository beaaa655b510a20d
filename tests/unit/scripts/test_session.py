"""How signals end a session."""

import os
import signal

import pytest

from scripts.session import terminated_as_exit


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_unwind_with_their_code_and_handlers_come_back(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stop, terminated_as_exit():
        os.kill(os.getpid(), number)
    assert stop.value.code == code and signal.getsignal(number) is before
