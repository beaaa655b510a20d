"""Packages that only one adapter needs, and that are not part of what a run needs."""

import importlib
from typing import Any

from conf.errors import ConfigError


def import_extra(module: str, extra: str) -> Any:
    """The module. `extra` is the one in pyproject.toml that brings it. Raises ConfigError: what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module != missing and not module.startswith(missing + "."):
            missing = f"{missing}, which {module} imports,"
        raise ConfigError(
            f"env={extra}: the package {missing} is not installed; pip install 'tandem-rl[{extra}]', or "
            "scripts/setup --envs for the tested versions of all adapters"
        ) from error
