"""The command line of every script: compose the config, check it, hand a plain dataclass to the task.

Only Hydra's Compose API is used. `hydra.main` would add an output folder, log files and its own error texts, and would
run the first job of a sweep before the last one has been checked.
"""

import argparse
import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from conf.errors import ConfigError
from conf.keys import about_choice, all_keys, default_text, group_choices, nearest, nearest_key
from conf.overrides import check, expand, read, with_environment
from conf.schema import Config, register

Task = Callable[[Config], int | None]

INTERRUPTED = (129, 130, 143)  # exit codes of a task that SIGHUP, Ctrl-C or SIGTERM has ended

register()


def launch(task: Task, config_name: str = "train", doc: str | None = None) -> NoReturn:
    """Runs `task` with the config of the command line and exits: 0, 2 for a configuration error, or the task's code."""
    try:
        code = main(task, sys.argv[1:], config_name, doc)
    except KeyboardInterrupt:  # before or after what the task itself cleans up
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception:  # printed here, and once: Ray and W&B both print it when it reaches the interpreter
        traceback.print_exc()
        code = 1
    sys.exit(code)


def main(task: Task, argv: list[str], config_name: str = "train", doc: str | None = None) -> int:
    """`launch` with explicit arguments and a returned exit code."""
    try:
        args = parse_arguments(argv)
        if args.help:
            print(help_text(doc))
            return 0
        configs = plan_jobs(args.overrides, config_name, args.multirun, args.config_dir)
    except ConfigError as error:
        return report(error)
    if args.cfg:
        print("---\n".join(to_yaml(cfg) for cfg in configs), end="")
        return 0
    if not args.multirun:
        return run_job(task, configs[0])
    codes = []
    for index, cfg in enumerate(configs):
        print(f"job {index + 1} of {len(configs)}: {cfg.name}", file=sys.stderr, flush=True)
        codes.append(run_swept_job(task, cfg))
        if codes[-1] in INTERRUPTED:  # whoever stops a sweep means all of it
            return codes[-1]
    return next((code for code in codes if code), 0)


def run_job(task: Task, cfg: Config) -> int:
    """Runs the task; a ConfigError from inside it is reported like one from the command line."""
    try:
        return task(cfg) or 0
    except ConfigError as error:
        return report(error)


def run_swept_job(task: Task, cfg: Config) -> int:
    """Runs one job of a sweep; an exception fails this job only."""
    try:
        return run_job(task, cfg)
    except Exception:
        traceback.print_exc()
        return 1


def report(error: ConfigError) -> int:
    """Prints a configuration error; the exit code for it."""
    print(f"configuration error: {error}", file=sys.stderr, flush=True)
    return 2


def compose(overrides: list[str], config_name: str = "train", config_dir: str | None = None) -> Config:
    """The checked config of these overrides, as a dataclass: no DictConfig is left in it."""
    keys, groups = all_keys(), group_choices()
    if config_dir is not None:
        groups = with_choices_of(groups, config_dir)
    with hydra_parser() as parser, config_errors():
        checked = [check(read(parser, text), keys, groups) for text in with_environment(overrides)]
        if config_dir is not None:
            checked.append(f'hydra.searchpath=["file://{Path(config_dir).resolve()}"]')
        composed = hydra.compose(config_name, checked)
        for key in sorted(OmegaConf.missing_keys(composed)):
            raise ConfigError(f"{key}=???: must be given; write {key}=VALUE")
        cfg = OmegaConf.to_object(composed)
    assert isinstance(cfg, Config)
    return cfg


def plan_jobs(overrides: list[str], config_name: str, multirun: bool, config_dir: str | None) -> list[Config]:
    """The configs of all jobs, each checked before the first one starts."""
    if not multirun:
        return [compose(overrides, config_name, config_dir)]
    with hydra_parser() as parser:
        jobs = expand(parser, overrides)
    configs = [compose(job, config_name, config_dir) for job in jobs]
    folders = [cfg.run_dir for cfg in configs if cfg.run_dir is not None]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ConfigError(
                f"run_dir={folder}: {folders.count(folder)} jobs of the sweep would share it; leave it null"
            )
    if len({cfg.name for cfg in configs}) < len(configs):  # a name is part of the run folder's: jobs must not share it
        configs = [replace(cfg, name=f"{cfg.name}-{index}") for index, cfg in enumerate(configs)]
    return configs


@contextlib.contextmanager
def hydra_parser() -> Iterator[OverridesParser]:
    """Hydra set up for this package, and put back afterwards; yields the parser of overrides."""
    with hydra.initialize_config_module("conf", version_base="1.3"):
        yield OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())


@contextlib.contextmanager
def config_errors() -> Iterator[None]:
    """Errors of Hydra, OmegaConf and YAML become one ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except MissingConfigException as error:  # raised for the defaults list of a YAML file
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        choices = [option for option in error.options or [] if option != "schema"]
        advice = f"; choices: {', '.join(choices)}; nearest: {nearest(choice, choices)}" if choices else ""
        raise ConfigError(f"a defaults list names {group}={choice}, which does not exist{advice}") from error
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(one_line(error)) from error


def one_line(error: BaseException) -> str:
    """What Hydra or OmegaConf found, in one line, with the nearest key when a YAML file names an unknown one."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if not line.startswith("object_type="))
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return text
    if cause is not error and cause.full_key and cause.full_key not in text:
        text = f"{text} {cause.full_key}: {str(cause.msg).splitlines()[0]}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return f"{text}; nearest: {nearest_key(str(cause.full_key), list(all_keys()))}"
    return text


def with_choices_of(groups: dict[str, list[str]], config_dir: str) -> dict[str, list[str]]:
    """The groups' choices together with those of a folder of the user."""
    if not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir={config_dir}: there is no such folder")
    return {
        group: sorted({*choices, *(file.stem for file in Path(config_dir, group).glob("*.yaml"))})
        for group, choices in groups.items()
    }


def to_dict(cfg: Config) -> dict[str, Any]:
    """The config as plain dictionaries, lists and scalars; enums are their names."""
    result = plain(cfg)
    assert isinstance(result, dict)
    return result


def plain(value: Any) -> Any:
    """A value of the config without dataclasses and enums."""
    if is_dataclass(value):
        return {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return value.name if isinstance(value, Enum) else value


def to_yaml(cfg: Config) -> str:
    """The config as YAML, for `--cfg job` and the run folder."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(cfg)))


class ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the options)")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Options and overrides, in any order, named as Hydra names them."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")  # what --cfg prints is always resolved
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    return parser.parse_intermixed_args(argv)


def help_text(doc: str | None) -> str:
    """The answer to --help."""
    groups = group_choices()
    experiments = groups.pop("experiment")
    script = f"python {sys.argv[0]}"
    width = max(map(len, [*groups, *experiments]))
    run_keys = [key for key in all_keys().values() if "." not in key.path]
    return "\n".join(
        [
            *([doc.strip(), ""] if doc else []),
            f"usage: {script} [-m] [--cfg job] [--config-dir DIR] [GROUP=CHOICE ...] [KEY=VALUE ...]",
            "",
            "  -m, --multirun     run every combination of values given as a,b or range(1,4); all are checked first",
            "  -c, --cfg job      print the resolved config and start nothing",
            "  -cd, --config-dir  a folder with more choices, such as DIR/experiment/mine.yaml",
            "  -h, --help         this text",
            "",
            "experiments (experiment=NAME):",
            *(f"  {name:{width}}  {about_choice('experiment', name)}" for name in experiments),
            "",
            "groups (GROUP=CHOICE):",
            *(f"  {group:{width}}  {', '.join(choices)}" for group, choices in groups.items()),
            "",
            "keys of the run (those of the groups are in docs/config.md):",
            *(f"  {key.path:20}{key.help} [{default_text(key.default)}]" for key in run_keys),
            "",
            "Every key, its type, default and meaning, and how to quote values: docs/config.md",
        ]
    )
