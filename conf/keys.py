"""The schema read as a flat list of keys: path, type, default, meaning. Overrides, help and docs all use it."""

import difflib
import types
import typing
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from conf.schema import Config

CONF = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the schema; `type` is the Python type without `| None`."""

    path: str
    type: Any
    optional: bool
    default: Any
    help: str

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.type) is list

    @property
    def is_dict(self) -> bool:
        return typing.get_origin(self.type) is dict

    @property
    def wanted(self) -> str:
        """The type in words, for messages and docs."""
        return type_words(self.type) + (" or null" if self.optional else "")

    def fits(self, value: Any) -> bool:
        """Whether a parsed override value has this key's type; nothing is converted, except an integer to a float."""
        return (value is None and self.optional) or has_type(self.type, value)


def type_words(hint: Any) -> str:
    """A type in words."""
    if typing.get_origin(hint) is list:
        return f"a list, each entry {type_words(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is dict:
        return "a dictionary"
    if issubclass(hint, Enum):
        return "one of " + ", ".join(member.name for member in hint)
    words: dict[type, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return words[hint]


def has_type(hint: Any, value: Any) -> bool:
    """Whether `value`, as Hydra parsed it, is of type `hint`."""
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(has_type(typing.get_args(hint)[0], entry) for entry in value)
    if typing.get_origin(hint) is dict:
        return isinstance(value, dict)
    if issubclass(hint, Enum):
        return isinstance(value, str) and value in hint.__members__
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str | int | float | bool)
    return type(value) is hint


def section_keys(section: type, prefix: str, instance: Any = None) -> list[Key]:
    """Keys of a dataclass, nested ones behind their section. Defaults come from `instance`, or from the fields."""
    keys = []
    hints = typing.get_type_hints(section)
    for entry in fields(section):
        default = field_default(entry) if instance is None else getattr(instance, entry.name)
        hint = hints[entry.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            keys += section_keys(hint, f"{prefix}{entry.name}.", default)
            continue
        optional = isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)
        if optional:
            (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        path, text = f"{prefix}{entry.name}", entry.metadata["help"]
        keys.append(Key(path=path, type=hint, optional=optional, default=default, help=text))
    return keys


def field_default(entry: Any) -> Any:
    """The default that a dataclass field declares."""
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def all_keys() -> dict[str, Key]:
    """Every key by its path; defaults are those of a run without any override."""
    return {key.path: key for key in section_keys(Config, "", Config())}


def nearest(word: str, options: list[str]) -> str:
    """The option that looks most like `word`."""
    return difflib.get_close_matches(word, options, n=1, cutoff=0.0)[0]


def nearest_key(path: str, options: list[str]) -> str:
    """The key most likely meant: the same name in any section, else the likest of the same section, else the likest."""
    *parents, last = path.split(".")
    same_name = [option for option in options if option.split(".")[-1] == last]
    if same_name:
        return ", ".join(same_name if not parents else [nearest(path, same_name)])
    section = ".".join([*parents, ""])
    return nearest(path, [option for option in options if option.startswith(section)] or options)


def group_choices() -> dict[str, list[str]]:
    """The YAML files of each config group, experiments last."""
    groups = {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in CONF.iterdir()}
    order = [*(field.name for field in fields(Config)), "experiment"]
    return {group: groups[group] for group in order if groups.get(group)}


def about_choice(group: str, choice: str) -> str:
    """The sentence at the top of a YAML file."""
    lines = (CONF / group / f"{choice}.yaml").read_text().splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("#") and not line.startswith("# @")), "")


def default_text(value: Any) -> str:
    """A default as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(default_text, value))}]"
    if isinstance(value, dict):
        return "{}" if not value else str(value)
    return value.name if isinstance(value, Enum) else str(value)
