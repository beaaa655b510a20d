"""Comparisons run in this process too, on tiny models."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.real import one_thread, random_folder


@pytest.fixture(scope="package", autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="package")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose random weights are large enough for every layer to matter. Read only."""
    return random_folder(tiny_folder, tmp_path_factory.mktemp("numerics") / "model", seed=1)
