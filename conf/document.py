"""Writes docs/config.md from the schema: `python -m conf.document`; `--check` only says whether the file is current."""

import argparse
import sys

from conf.keys import CONF, Key, about_choice, all_keys, default_text, group_choices

PAGE = CONF.parent / "docs" / "config.md"

HOW_TO = """\
# Configuration

<!-- Written by `python -m conf.document` from conf/schema.py and the YAML files in conf/: change those. -->

Every key has its type, its default and its rules in [conf/schema.py](../conf/schema.py). The YAML files in `conf/` hold
only differences from it. A script composes them in this order, the later ones winning: schema, one choice of each
group, the experiment, the command line. The result is checked as a whole before anything starts.

    python scripts/train.py experiment=quickstart
    python scripts/train.py experiment=tiny_sort trainer=zero2 num_steps=20
    python scripts/train.py experiment=quickstart --cfg job    # print the resolved config, start nothing
    python scripts/train.py --help

A mistake ends with exit code 2 and one message on stderr that names the key, its value and what would be right.

## Overrides

| write | meaning |
|---|---|
| `trainer.lr=3e-5` | sets a key. Every key can be set like this, without `+` |
| `trainer=zero3` | chooses a file of a group |
| `run_dir=null` | null is "off" or "none"; only keys whose type says "or null" take it |
| `'rollout.tp=[1,2]'` | a list, which replaces the old one whole |
| `data.kwargs.digits=2` | an entry of a dictionary (`kwargs`); entries may be new |
| `'data.kwargs={digits: 2, terms: 3}'` | several entries; those not named stay |
| `'sft.lr=${trainer.lr}'` | takes the value of another key |

- Integers are written without leading zeros or quotes, switches as `true` or `false`. Nothing is converted, except an
  integer to a number; a number given for a text key stays as it was typed.
- `+key=value` and `++key=value` cannot add keys that the schema does not have: nothing would read them.
- Hydra's own settings (`hydra.run.dir` and the like) are refused: only its grammar and its composition are used.

## Quoting

The shell takes one layer of quotes, Hydra's grammar the next. Text needs Hydra's quotes when it holds
`= , ( ) [ ] { } # ' ; | !` or spaces at an end, and the whole then goes into the shell's single quotes:

| value | write |
|---|---|
| `a=b.jsonl` | `'data.path="a=b.jsonl"'` |
| `a,b.jsonl` | `'data.path="a,b.jsonl"'` |
| a list of texts | `'data.kwargs.stop=["###","a,b"]'` |
| the text `null` or `true` | `'data.system_prompt="null"'` |

## Sweeps

`-m` runs every combination of several values in one process, one job after the other:

    python scripts/train.py -m experiment=tiny_sort trainer.lr=1e-4,3e-4 'seed=range(3)'

All jobs are checked before the first one starts. Jobs that would have the same `name` get `-0`, `-1`, ... behind it, as
the name is part of the run folder's; `run_dir` must not be shared. A job that fails does not stop the next ones; the
exit code is the first one that is not 0. Values are given as `a,b`, `'choice(a,b)'`, `'range(1,4)'` or, for groups,
`'glob(*)'`.

## Experiments and choices of your own

A new file in `conf/experiment/` is an experiment. It starts with `# @package _global_` and holds only differences.
Files outside the project are found with `--config-dir DIR`, as `DIR/experiment/NAME.yaml`, `DIR/model/NAME.yaml` and
so on; a file of a group starts with `defaults: [schema, _self_]`.
"""


def page() -> str:
    """The whole page."""
    keys = list(all_keys().values())
    groups = group_choices()
    experiments = groups.pop("experiment")
    parts = [HOW_TO, "## Experiments\n", group_table({"experiment": experiments}), "## Groups\n", group_table(groups)]
    parts += ["## Keys\n\nDefaults are those without any override.\n", "### The run\n"]
    parts.append(key_table([key for key in keys if "." not in key.path]))
    sections = dict.fromkeys(key.path.split(".")[0] for key in keys if "." in key.path)
    for section in sections:
        parts += [f"### {section}\n", key_table([key for key in keys if key.path.startswith(f"{section}.")])]
    return "\n".join(parts)


def group_table(groups: dict[str, list[str]]) -> str:
    """One row for each choice of each group."""
    rows = [f"| `{group}={name}` | {about_choice(group, name)} |" for group, names in groups.items() for name in names]
    return "\n".join(["| write | what it is |", "|---|---|", *rows, ""])


def key_table(keys: list[Key]) -> str:
    """One row for each key."""
    rows = [f"| `{key.path}` | {key.wanted} | `{default_text(key.default)}` | {cell(key.help)} |" for key in keys]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def cell(text: str) -> str:
    """Text for a table cell, where a bar would end the cell."""
    return text.replace("|", "\\|")


def main() -> int:
    """Writes the page, or checks it."""
    parser = argparse.ArgumentParser(prog="python -m conf.document", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 when docs/config.md is not current")
    if not parser.parse_args().check:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        print("docs/config.md is not current: run `python -m conf.document`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
