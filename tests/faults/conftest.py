"""The starter of real runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.runs import Launch, launcher


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The current folder of the runs: user modules lie here."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def launch(work: Path, tiny_folder: Path) -> Iterator[Launch]:
    """See tests.faults.runs.launcher."""
    with launcher(work, tiny_folder) as start:
        yield start
