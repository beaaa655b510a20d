"""Functions named in the configuration by import path (`data._target_`, `reward._target_`)."""

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from conf.errors import ConfigError


def import_function(path: str, key: str) -> Callable[..., Any]:
    """The callable at import path `path` ("package.module.function"); `key` is the configuration key that names it.

    The current directory is searched too, after everything installed; it stays on sys.path, as the function may import
    its neighbours later. Raises ConfigError when the module or the attribute is missing, fails to import, or is not
    callable.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"{key}={path}: must be an import path like package.module.function")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (module_name == missing or module_name.startswith(missing + ".")):
            raise ConfigError(
                f"{key}={path}: no module {missing!r} among the installed packages or in {os.getcwd()}"
            ) from error
        raise ConfigError(f"{key}={path}: importing {module_name} failed: {describe(error)}") from error
    if not hasattr(module, name):
        known = [other for other in vars(module) if callable(getattr(module, other)) and not other.startswith("_")]
        raise ConfigError(f"{key}={path}: module {module_name} has no {name!r}{nearest(name, known)}")
    function: Callable[..., Any] = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"{key}={path}: is a {type(function).__name__}, not a function")
    return function


def check_arguments(function: Callable[..., Any], key: str, path: str, *args: Any, **kwargs: Any) -> None:
    """Raises ConfigError unless `function(*args, **kwargs)` fits its signature. Calls nothing."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some functions written in C have no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        section = key.partition(".")[0]
        raise ConfigError(f"{key}={path} with {section}.kwargs={kwargs}: {path}{signature}: {error}") from error


def nearest(name: str, known: list[str]) -> str:
    """The tail of a message about an unknown `name`: the nearest known one, or all of them."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if known else ""


def describe(error: BaseException) -> str:
    """One line: type, message, and the file and line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
