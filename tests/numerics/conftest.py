"""Comparisons run in this process too, on tiny models."""

from collections.abc import Iterator

import pytest

from tests.integration.real import one_thread


@pytest.fixture(scope="package", autouse=True)
def single_thread() -> Iterator[None]:
    with one_thread():
        yield
