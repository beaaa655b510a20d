"""What several test files need: a tiny Hugging Face folder, and hypothesis without wall-clock limits."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported: on models as small as those of the tests, a second thread costs more than it brings.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A background job of a script starts with Ctrl-C ignored, and so would every program that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine must not fail a property, and a failure must come back in the next run.
settings.register_profile("tandem", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("tandem")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3-type model with its tokenizer, as a Hugging Face folder. Read only."""
    from scripts.prepare_model import prepare_tiny

    return prepare_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny_folder`, with experts. Read only."""
    from scripts.prepare_model import prepare_tiny_moe

    return prepare_tiny_moe(tmp_path_factory.mktemp("models") / "tiny_moe")
