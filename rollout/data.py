"""Prompts and demonstrations, from files or generators to token ids. Whatever is wrong is a ConfigError at launch."""

import json
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conf.choices import Template
from conf.errors import ConfigError
from conf.imports import check_arguments, describe, import_function, nearest
from conf.schema import DataConfig, SftConfig
from rl.faults import SyncError
from rl.prompts import epoch_order
from rl.types import Prompt
from weightsync.channels.disk import require_whole_version

Record = dict[str, Any]
# (where it stands, for messages; the record)
Row = tuple[str, Record]

# Folders that scripts/prepare_model.py makes.
OURS = ("models/tiny", "models/smollm2")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_records(cfg: DataConfig, seed: int, with_prompts: bool = True) -> tuple[list[Record], list[Record]]:
    """(training records, held-out records), each with a prompt of the right type where they need one. Raises
    ConfigError."""
    if cfg._target_ is not None:
        train = call_generator(cfg, "train", seed, cfg.size, cfg.kwargs)
        held_out = call_generator(cfg, "eval", seed, cfg.eval_size, cfg.kwargs) if cfg.eval_size else []
    else:
        train = read_rows(str(cfg.path), "data.path", splits=("train",))
        if cfg.eval_path is not None:
            held_out = read_rows(cfg.eval_path, "data.eval_path", splits=("test", "validation", "eval"))
            held_out = held_out[: cfg.eval_size]
        elif cfg.eval_size >= len(train):
            raise ConfigError(
                f"data.path={cfg.path} has {len(train)} rows and data.eval_size={cfg.eval_size}: none is left for "
                "training; lower data.eval_size or name other rows with data.eval_path"
            )
        else:
            cut = len(train) - cfg.eval_size
            train, held_out = train[:cut], train[cut:]
    for where, record in train + held_out if with_prompts else []:
        check_prompt(where, record, cfg)
    return [record for _, record in train], [record for _, record in held_out]


def call_generator(cfg: DataConfig, split: str, seed: int, size: int, kwargs: dict[str, Any]) -> list[Row]:
    """The records of generator `cfg._target_` for one split. Raises ConfigError, also when the generator raises."""
    path = str(cfg._target_)
    function = import_function(path, "data._target_")
    check_arguments(function, "data._target_", path, split, seed, size, **kwargs)
    key = f"data._target_={path}, split {split!r}"
    try:
        records = function(split, seed, size, **kwargs)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except (Exception, SystemExit) as error:  # sys.exit in it would end this program without a word
        raise ConfigError(f"{key}: raised\n{traceback.format_exc(limit=-5)}") from error
    if not isinstance(records, list):
        raise ConfigError(f"{key}: returned a {type(records).__name__}, not a list of dicts")
    if not records:
        raise ConfigError(f"{key}: returned no records")
    rows = [(f"{key}: record {index}", record) for index, record in enumerate(records)]
    for where, record in rows:
        if not isinstance(record, dict):
            raise ConfigError(f"{where}: is a {type(record).__name__}, not a dict")
    return rows


def read_rows(path: str, key: str, splits: tuple[str, ...]) -> list[Row]:
    """All rows of a file or folder (of the first of `splits` that it has, where it has any). Raises ConfigError."""
    where = Path(path)
    readers: dict[str, Callable[[Path, str], list[Row]]] = {
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".parquet": _read_parquet,
    }
    if not where.exists():
        raise ConfigError(f"{key}={path}: no such file or folder (looked in {Path.cwd()})")
    if where.is_dir():
        rows = _read_folder(where, key, splits)
    elif where.suffix.lower() in readers:
        try:
            rows = readers[where.suffix.lower()](where, key)
        except OSError as error:
            raise ConfigError(f"{key}={path}: {describe(error)}") from error
    else:
        raise ConfigError(
            f"{key}={path}: unknown format {where.suffix!r}; known: {', '.join(readers)}, or a folder saved by datasets"
        )
    if not rows:
        raise ConfigError(f"{key}={path}: is empty")
    return rows


def _read_jsonl(path: Path, key: str) -> list[Row]:
    rows: list[Row] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{key}: {where}: not JSON: {error}") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{key}: {where}: is a {type(record).__name__}, not an object")
            rows.append((f"{key}: {where}", record))
    return rows


def _read_json(path: Path, key: str) -> list[Row]:
    """A JSON array of objects; a file that starts otherwise is read as one object per line."""
    content = path.read_bytes()
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return _read_jsonl(path, key)
    try:
        records = json.loads(content.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{key}: {path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: {path}: not JSON: {error}") from error
    rows = [(f"{key}: {path}: row {index}", record) for index, record in enumerate(records)]
    for where, record in rows:
        if not isinstance(record, dict):
            raise ConfigError(f"{where}: is a {type(record).__name__}, not an object")
    return rows


def _read_parquet(path: Path, key: str) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    # Not through datasets, which would leave a copy of the file in its cache.
    try:
        records = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{key}={path}: not a readable parquet file: {error}") from error
    return [(f"{key}: {path}: row {index}", record) for index, record in enumerate(records)]


def _read_folder(path: Path, key: str, splits: tuple[str, ...]) -> list[Row]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # from a broken folder: whatever json, pyarrow or the file system raise
        raise ConfigError(f"{key}={path}: not a folder saved by datasets (save_to_disk): {describe(error)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        name = next((split for split in splits if split in loaded), None)
        if name is None:
            raise ConfigError(f"{key}={path}: has the splits {', '.join(loaded)}; one of {', '.join(splits)} is needed")
        loaded = loaded[name]
    return [(f"{key}: {path}: row {index}", record) for index, record in enumerate(loaded.to_list())]


def check_prompt(where: str, record: Record, cfg: DataConfig) -> None:
    """Raises ConfigError unless the record has a prompt for `cfg.template`: text, or for chat a list of messages."""
    key = cfg.prompt_key
    if key not in record:
        raise ConfigError(f"{where}: no column data.prompt_key={key!r}{nearest(key, [str(name) for name in record])}")
    prompt = record[key]
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise ConfigError(f"{where}: {key!r} is a {type(prompt).__name__}, not a string or a list of messages")
    if cfg.template is Template.plain:
        raise ConfigError(
            f"{where}: {key!r} is a list of messages; data.template=plain takes text; use data.template=chat"
        )
    if not prompt:
        raise ConfigError(f"{where}: {key!r} is an empty list of messages")
    for number, message in enumerate(prompt):
        if not isinstance(message, dict):
            raise ConfigError(
                f"{where}: message {number} of {key!r} is a {type(message).__name__}, not role and content"
            )
        for name in ("role", "content"):
            value = message.get(name)
            if not isinstance(value, str):
                raise ConfigError(f"{where}: message {number} of {key!r}: {name!r} is {value!r}, not a string")


def check_template(cfg: DataConfig, tokenizer: Any) -> None:
    """Raises ConfigError when the tokenizer lacks what `cfg.template` needs."""
    if cfg.template is Template.plain:
        if cfg.system_prompt is not None:
            raise ConfigError(
                f"data.template=plain with data.system_prompt={cfg.system_prompt!r}: it needs data.template=chat"
            )
    elif not tokenizer.chat_template:
        name = getattr(tokenizer, "name_or_path", "") or "the model"
        raise ConfigError(
            f"data.template=chat: {name} has no chat template; use data.template=plain or a model that has one"
        )


def prompt_ids(where: str, record: Record, cfg: DataConfig, tokenizer: Any) -> list[int]:
    """Token ids [N >= 1] of one prompt, encoded once: only one layer writes special tokens. Raises ConfigError."""
    check_prompt(where, record, cfg)
    prompt = record[cfg.prompt_key]
    if cfg.template is Template.plain:
        ids = tokenizer(prompt, add_special_tokens=True)["input_ids"]
    else:
        messages = prompt
        if isinstance(prompt, str):
            system = [] if cfg.system_prompt is None else [{"role": "system", "content": cfg.system_prompt}]
            messages = [*system, {"role": "user", "content": prompt}]
        try:
            ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # templates are programs: they raise what they like, e.g. for an unknown role
            raise ConfigError(f"{where}: the chat template refuses it: {type(error).__name__}: {error}") from error
    ids = [int(token) for token in ids]
    if not ids:
        raise ConfigError(f"{where}: {cfg.prompt_key!r} is empty: it has no tokens")
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise ConfigError(
            f"{where}: starts with {tokenizer.bos_token!r} twice: data.template={cfg.template.value} already writes it"
        )
    return ids


def render_prompts(
    records: list[Record], cfg: DataConfig, tokenizer: Any, room_tokens: int
) -> tuple[list[Prompt], int]:
    """(prompts of at most `room_tokens` ids, how many longer ones were left out). `Prompt.index` counts all `records`.

    Raises ConfigError for a prompt that is malformed or, unless cfg.drop_overlong, too long; and when none is left.
    """
    check_template(cfg, tokenizer)
    prompts: list[Prompt] = []
    for index, record in enumerate(records):
        ids = prompt_ids(f"prompt {index}", record, cfg, tokenizer)
        if len(ids) <= room_tokens:
            prompts.append(Prompt(index=index, token_ids=ids, record=record))
        elif not cfg.drop_overlong:
            raise ConfigError(
                f"prompt {index}: {len(ids)} tokens, and the room for a prompt is {room_tokens}; "
                "raise rollout.max_model_len, or leave them out with data.drop_overlong=true"
            )
    if records and not prompts:
        raise ConfigError(
            f"data.drop_overlong=true: all {len(records)} prompts are longer than the room of {room_tokens} tokens"
        )
    return prompts, len(records) - len(prompts)


def read_object(path: Path, key: str = "model.path") -> dict[str, Any]:
    """The JSON object in a file of the model folder. Raises ConfigError."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{key}={path.parent}: no {path.name} can be read there ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{key}={path.parent}: {path.name} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{key}={path.parent}: {path.name} holds a {type(value).__name__}, not a JSON object")
    return value


def require_model_folder(model_path: str, key: str = "model.path") -> None:
    """Raises ConfigError unless there is a Hugging Face model folder with a tokenizer."""
    folder = Path(model_path)
    if not folder.is_dir():
        make = f"; make it with: python scripts/prepare_model.py {folder.name}" if model_path in OURS else ""
        raise ConfigError(f"{key}={model_path}: no such folder (looked in {Path.cwd()}){make}")
    try:
        require_whole_version(folder)
    except SyncError as error:
        raise ConfigError(f"{key}={model_path}: {error}") from error
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{key}={model_path}: no config.json in it; a Hugging Face model folder is needed")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"{key}={model_path}: no tokenizer in it (one of {', '.join(TOKENIZER_FILES)})")


def load_tokenizer(model_path: str, key: str = "model.path") -> Any:
    """The transformers tokenizer of a model folder. Raises ConfigError when something is missing or broken."""
    require_model_folder(model_path, key)
    from transformers import AutoTokenizer  # seconds, which a wrong path need not cost

    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except Exception as error:  # whatever a broken file makes the many tokenizer classes raise
        raise ConfigError(f"{key}={model_path}: its tokenizer cannot be loaded: {describe(error)}") from error


def render_demonstrations(
    cfg: DataConfig, sft: SftConfig, tokenizer: Any, count: int, seed: int
) -> list[tuple[list[int], list[int]]]:
    """All demonstrations for the supervised warm start, as (prompt ids, completion ids ending with eos).

    They are the generator's split "sft" (asked for `count`) or, however many, the training rows of `data.path`; their
    column "completion" is a string. Raises ConfigError.
    """
    check_template(cfg, tokenizer)
    if tokenizer.eos_token_id is None:
        raise ConfigError("sft: the tokenizer has no eos token, so a demonstration could not end")
    if cfg._target_ is not None:
        rows = call_generator(cfg, "sft", seed, count, cfg.kwargs | sft.kwargs)
    else:
        if sft.kwargs:
            raise ConfigError(f"sft.kwargs={sft.kwargs} with data.path={cfg.path}: only data._target_ takes them")
        records, _ = load_records(cfg, seed)
        rows = [(f"data.path={cfg.path}: record {index}", record) for index, record in enumerate(records)]
    return [
        (prompt_ids(where, record, cfg, tokenizer), _completion_ids(where, record, tokenizer)) for where, record in rows
    ]


def draw_demonstrations(
    cfg: DataConfig, pairs: Sequence[tuple[list[int], list[int]]], count: int, seed: int
) -> list[tuple[list[int], list[int]]]:
    """`count` of them, drawn like prompts, epoch after epoch, so that fewer than `count` repeat evenly."""
    drawn: list[tuple[list[int], list[int]]] = []
    while len(drawn) < count:
        order = epoch_order(len(drawn) // len(pairs), len(pairs), seed, cfg.shuffle)
        drawn += [pairs[index] for index in order[: count - len(drawn)]]
    return drawn


def _completion_ids(where: str, record: Record, tokenizer: Any) -> list[int]:
    if "completion" not in record:
        raise ConfigError(f"{where}: no column 'completion'{nearest('completion', [str(name) for name in record])}")
    text = record["completion"]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: 'completion' is a {type(text).__name__}, not a string")
    ids = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    eos = int(tokenizer.eos_token_id)
    return ids if ids and ids[-1] == eos else [*ids, eos]
