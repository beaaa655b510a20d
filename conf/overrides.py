"""Command-line overrides: read, checked against the schema, expanded into the jobs of a sweep.

Hydra's grammar is used as it is; the checks come before Hydra composes anything, because its own messages name neither
the wanted type nor the nearest key, and because it lets `+` add keys that nothing reads.
"""

import itertools
import re
import shlex
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from conf.errors import ConfigError
from conf.keys import Key, nearest, nearest_key


def read(parser: OverridesParser, text: str) -> Override:
    """Parses one override, or says how it has to be written."""
    try:
        (override,) = parser.parse_overrides([text])
    except HydraException as error:
        raise ConfigError(f"{text}: {syntax_advice(text)}") from error
    if not override.key_or_group:
        raise ConfigError(f"{text}: {syntax_advice('')}")
    return override


def syntax_advice(text: str) -> str:
    """What to write instead of an override that cannot be read."""
    key, equals, value = text.partition("=")
    if not equals:
        return "an override is key=value, for example num_steps=20"
    if not re.fullmatch(r"(\+{0,2}|~)[\w./@]+", key):
        return f"{key!r} is not a key; write key=value without spaces round '='"
    if value.startswith(("[", "{")):
        example = f'{key}=["first text","second text"]' if value.startswith("[") else f'{key}={{name: "some text"}}'
        return f"the value cannot be read; quote each text in it, and the whole for the shell: {shlex.quote(example)}"
    return f"the value has characters that need quotes; write {quoted(key, value)}"


def quoted(key: str, value: str) -> str:
    """The override that gives `value` as text, as it is typed into a shell."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)  # Hydra reads backslashes only before a quote
    trailing = re.search(r"\\*$", escaped)
    return shlex.quote(f'{key}="{escaped}{trailing.group() if trailing else ""}"')


def expand(parser: OverridesParser, texts: list[str]) -> list[list[str]]:
    """The jobs of a sweep: every combination of the values of `a=1,2`, `a=range(3)`, `a=choice(..)`, `a=glob(*)`."""
    alternatives: dict[str, list[str]] = {}
    for text in texts:
        override = read(parser, text)
        key = override.get_key_element()
        if not override.is_sweep_override():
            alternatives[key] = [text]
        elif override.is_discrete_sweep():
            values = [value for value in override.sweep_string_iterator() if value != "schema"]  # glob(*) finds it too
            alternatives[key] = [f"{key}={value}" for value in values]
            if not alternatives[key]:
                raise ConfigError(f"{text}: the sweep has no value")
        else:
            raise ConfigError(f"{text}: only lists of values can be swept: a,b or choice(a,b) or range(1,4) or glob(*)")
    return [list(job) for job in itertools.product(*alternatives.values())]


def check(override: Override, keys: dict[str, Key], groups: dict[str, list[str]]) -> str:
    """The override to hand to Hydra; ConfigError when the schema has no such key, choice or type."""
    path, text = override.key_or_group, str(override.input_line)
    if path.split("/")[0].split(".")[0] == "hydra":
        raise ConfigError(f"{text}: Hydra's own settings have no effect here; the run folder is set with run_dir=PATH")
    if override.package is not None:
        raise ConfigError(f"{text}: a config group has a fixed place; write {path}=CHOICE")
    if path in groups:
        return check_group(override, groups[path])
    if any(key.startswith(f"{path}.") for key in keys):
        raise ConfigError(f"{text}: {path} is a section; set its keys, for example {nearest(f'{path}.', list(keys))}")
    if any(key.is_dict and path.startswith(f"{key.path}.") for key in keys.values()):
        require_single(override, None)
        return text if override.is_delete() else force_add(text)
    if path not in keys:
        raise ConfigError(unknown_key(text, path, keys, groups))
    if override.is_delete():
        off = f"{path}=null" if keys[path].optional else f"{path}=VALUE"
        raise ConfigError(f"{text}: a key of the schema cannot be deleted; write {off}")
    if override.is_add():
        raise ConfigError(f"{text}: the key exists, so write {text[1:]}")
    require_single(override, keys[path])
    return check_value(override, keys[path])


def with_environment(texts: list[str]) -> list[str]:
    """`env=package.module.Class` as the key that it stands for; and, unless they are chosen, the tasks and rewards that
    go with an environment."""
    chosen = {re.split(r"[=.@]", text.lstrip("+~"), maxsplit=1)[0] for text in texts}
    expanded = []
    for text in texts:
        group, _, choice = text.partition("=")
        if group == "env" and (choice.endswith(".py") or "/" in choice):
            parts = choice.removesuffix(".py").removeprefix("./").split("/")
            module = ".".join(parts) if all(part.isidentifier() for part in parts) else "package.module"
            raise ConfigError(f"{text}: takes no file; name the class in it as it is imported: env={module}.CLASS")
        if group == "env" and choice not in ("", "none"):
            path = re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", choice)
            expanded.append(f"env._target_={choice}" if path else text)
            expanded += [f"{key}={value}" for key, value in (("data", "env"), ("reward", "none")) if key not in chosen]
        else:
            expanded.append(text)
    return expanded


def force_add(text: str) -> str:
    """The override of a free dictionary, or of an entry of one: entries may be new, so Hydra wants '++'."""
    return "++" + text.lstrip("+")


def unknown_key(text: str, path: str, keys: dict[str, Key], groups: dict[str, list[str]]) -> str:
    """The message for a key that the schema does not have."""
    likely = nearest_key(path, [*keys, *groups])
    plus = ", and '+' cannot add one" if text.startswith("+") else ""
    return f"{text}: there is no key {path}{plus}; nearest: {likely}"


def check_group(override: Override, choices: list[str]) -> str:
    """Checks the choice of a config group."""
    group, text = override.key_or_group, str(override.input_line)
    if override.is_delete():
        raise ConfigError(f"{text}: a group cannot be deleted; choose one of {', '.join(choices)}")
    if override.is_add() or override.is_force_add():
        raise ConfigError(f"{text}: the group exists, so write {text.lstrip('+')}")
    if override.is_sweep_override():
        raise ConfigError(f"{text}: a sweep needs -m; without it choose one of {', '.join(choices)}")
    value = override.value()
    if value in choices:
        return text
    likely = f"; nearest: {nearest(value, choices)}" if isinstance(value, str) else ""
    raise ConfigError(f"{text}: {group} has no such choice; choices: {', '.join(choices)}{likely}")


def require_single(override: Override, key: Key | None) -> None:
    """Refuses the values of a sweep where there is one job."""
    if not override.is_sweep_override():
        return
    text = str(override.input_line)
    path, _, value = text.partition("=")
    advice = "-m runs one job for each value"
    if key is None or key.is_list:
        advice += f"; for a list write {shlex.quote(f'{path}=[{value}]')}"
    if key is None or key.type is str:
        advice += f"; for a text with commas write {quoted(path, value)}"
    raise ConfigError(f"{text}: these are several values, and this is a single run; {advice}")


def check_value(override: Override, key: Key) -> str:
    """Checks the type of a value; a number or a bool for a text key stays what was typed (2024.10 is not 2024.1)."""
    text, value = str(override.input_line), override.value()
    if isinstance(value, str) and ("${" in value or value == "???"):
        return text  # an interpolation is resolved and checked by OmegaConf
    if not key.fits(value):
        raise ConfigError(f"{text}: {key.path} must be {key.wanted}, not {describe(value)}{type_advice(key, value)}")
    if key.is_dict:
        return force_add(text)
    typed = text.partition("=")[2]
    if key.type is str and isinstance(value, int | float) and re.fullmatch(r"[\w.+-]+", typed):
        return f'{key.path}="{typed}"' if not override.is_force_add() else f'++{key.path}="{typed}"'
    return text


def type_advice(key: Key, value: Any) -> str:
    """A hint at what was meant by a value of the wrong type."""
    if key.type is int and isinstance(value, str) and re.fullmatch(r"-?[0-9_]+", value):
        return f"; write {int(value)}, without leading zeros or quotes"
    if key.is_list and not isinstance(value, list | dict) and value is not None:
        return f"; write {shlex.quote(f'{key.path}=[{value}]')}"
    if isinstance(value, str) and hasattr(key.type, "__members__"):
        return f"; nearest: {nearest(value, list(key.type.__members__))}"
    return ""


def describe(value: Any) -> str:
    """A parsed value with its type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"the text {value!r}" if isinstance(value, str) else f"{value!r}"
