"""From files and generators to token ids: what is right arrives exactly, what is wrong is named with its place."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from conf.choices import Template
from conf.errors import ConfigError
from conf.schema import DataConfig, SftConfig
from rollout.data import draw_demonstrations, load_records, load_tokenizer, render_demonstrations, render_prompts

PAD, EOS, BOS = 0, 1, 2
CHARS = "abcdefghijklmnopqrstuvwxyzCDEF?: =\n"
VOCAB = {token: index for index, token in enumerate(["<pad>", "<eos>", "<bos>", *CHARS])}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def make_tokenizer(
    template: str | None = TEMPLATE, adds_bos: bool = True, pad: str = "<pad>"
) -> PreTrainedTokenizerFast:
    """One token per character; writes BOS in front of plain text when `adds_bos`."""
    core = Tokenizer(models.WordLevel(VOCAB, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, eos_token="<eos>", bos_token="<bos>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<pad>"]})
    tokenizer.chat_template = template
    return tokenizer


def encode(text: str) -> list[int]:
    return [VOCAB[char] for char in text]


def make_cfg(path: Path | str | None = None, **changes: Any) -> DataConfig:
    changes.setdefault("eval_size", 0)
    return DataConfig(path=None if path is None else str(path), **changes)


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_records(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{chr(97 + i)}=", "answer": chr(97 + i)} for i in range(count)]


# Reading files


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Path]:
    """The same five records in every format."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    records = make_records(5)
    table = pyarrow.Table.from_pylist(records)
    paths = {name: tmp_path / f"prompts.{name}" for name in ("jsonl", "json", "parquet", "folder", "splits")}
    write_jsonl(paths["jsonl"], records)
    paths["json"].write_text(json.dumps(records, indent=1))
    pyarrow.parquet.write_table(table, paths["parquet"])
    dataset = datasets.Dataset(table)
    dataset.save_to_disk(str(paths["folder"]))
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(str(paths["splits"]))
    return paths


def test_every_format_gives_the_same_records(saved: dict[str, Path]) -> None:
    for name, path in saved.items():
        train, held_out = load_records(make_cfg(path, eval_size=2), seed=0)
        assert (train, held_out) == (make_records(5)[:3], make_records(5)[3:]), name
    train, held_out = load_records(make_cfg(saved["folder"], eval_path=str(saved["splits"]), eval_size=4), seed=0)
    assert (train, held_out) == (make_records(5), make_records(5)[:4])


def test_eval_size_zero_holds_nothing_out(saved: dict[str, Path]) -> None:
    assert load_records(make_cfg(saved["jsonl"]), seed=0) == (make_records(5), [])


def test_holding_out_more_than_there_is(saved: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"has 5 rows and data.eval_size=5"):
        load_records(make_cfg(saved["jsonl"], eval_size=5), seed=0)


def test_jsonl_may_have_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "b"}')
    assert [r["prompt"] for r in load_records(make_cfg(path), 0)[0]] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', r"p\.jsonl:3: not JSON"),
        ("p.jsonl", b'{"prompt": "a"}\n"b"\n', r"p\.jsonl:2: is a str, not an object"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', r"p\.jsonl:2: not JSON: 'utf-8'"),
        (
            "p.jsonl",
            b'{"prompt": "a"}\n{"promt": "b"}\n',
            r"p\.jsonl:2: no column data.prompt_key='prompt'; did you mean 'promt'",
        ),
        ("p.jsonl", b'{"prompt": "a"}\n{"x": "b"}\n', r"p\.jsonl:2: no column data.prompt_key='prompt'; known: x"),
        ("p.jsonl", b'{"prompt": 3}\n', r"p\.jsonl:1: 'prompt' is a int, not a string"),
        ("p.jsonl", b'{"prompt": null}\n', r"p\.jsonl:1: 'prompt' is a NoneType"),
        ("p.jsonl", b"", "is empty"),
        ("p.jsonl", b"\n \n", "is empty"),
        ("p.json", b"[]", "is empty"),
        ("p.json", b'[{"prompt": "a"},\n 3]', r"p\.json: row 1: is a int, not an object"),
        ("p.json", b'[{"prompt": "a"},\n {"prompt": }]', r"p\.json:2: not JSON"),
        ("p.json", b'{"prompt": "a"}\n{"prompt" "b"}', r"p\.json:2: not JSON"),
        ("p.parquet", b"PAR1 no", "not a readable parquet file"),
        ("p.csv", b"prompt\na\n", r"unknown format '\.csv'; known: \.jsonl, \.json, \.parquet"),
        ("missing/p.jsonl", None, "no such file or folder"),
        ("folder", None, "not a folder saved by datasets"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_records(make_cfg(tmp_path / name), 0)
    assert "data.path" in str(caught.value)


def test_bad_eval_file_is_named_by_its_key(saved: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"data.eval_path=nowhere.jsonl: no such file"):
        load_records(make_cfg(saved["jsonl"], eval_path="nowhere.jsonl", eval_size=2), 0)


def test_folder_without_the_needed_split(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict({"dev": datasets.Dataset.from_list(make_records(2))}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(ConfigError, match="has the splits dev; one of train is needed"):
        load_records(make_cfg(tmp_path / "d"), 0)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty list of messages"),
        (["hello"], "message 0 of 'prompt' is a str, not role and content"),
        ([{"role": "user"}], "message 0 of 'prompt': 'content' is None"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "message 1 of 'prompt': 'role' is None"),
        ([{"role": "user", "content": ["a"]}], "'content' is \\['a'\\]"),
    ],
)
def test_malformed_messages(tmp_path: Path, messages: list[Any], message: str) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": messages}])
    with pytest.raises(ConfigError, match=rf"p\.jsonl:1: .*{message}"):
        load_records(make_cfg(path), 0)
    with pytest.raises(ConfigError, match=f"prompt 0: .*{message}"):
        render_prompts([{"prompt": messages}], make_cfg(path), make_tokenizer(), 100)


# Generators

GENERATORS = """
def good(split, seed, size, letter="a"):
    return [{"prompt": f"{letter}{split}{seed}", "completion": "b"} for _ in range(size)]
def raises(split, seed, size):
    return 1 / 0
def no_list(split, seed, size):
    return {"prompt": "a"}
def nothing(split, seed, size):
    return []
def no_dicts(split, seed, size):
    return ["a"]
def no_prompt(split, seed, size):
    return [{"prompts": "a"}]
def nothing_held_out(split, seed, size):
    return [] if split == "eval" else [{"prompt": "a"}]
def too_few(split, seed):
    return []
"""


@pytest.fixture
def generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data_generators.py").write_text(GENERATORS)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("generators")
def test_generator_in_the_current_directory() -> None:
    cfg = make_cfg(_target_="data_generators.good", size=3, eval_size=2, kwargs={"letter": "z"})
    train, held_out = load_records(cfg, seed=5)
    assert [r["prompt"] for r in train] == ["ztrain5"] * 3
    assert [r["prompt"] for r in held_out] == ["zeval5"] * 2


def test_built_in_generators() -> None:
    for task, counts in (("arithmetic", (65, 16)), ("sort", (100, 20))):
        train, held_out = load_records(make_cfg(_target_=f"rollout.tasks.{task}.generate", size=100, eval_size=20), 0)
        assert (len(train), len(held_out)) == counts


@pytest.mark.usefixtures("generators")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"split 'train': raised\n(?s:.*)ZeroDivisionError"),
        ("no_list", "returned a dict, not a list of dicts"),
        ("nothing", "split 'train': returned no records"),
        ("nothing_held_out", "split 'eval': returned no records"),
        ("no_dicts", "record 0: is a str, not a dict"),
        ("no_prompt", "record 0: no column data.prompt_key='prompt'; did you mean 'prompts'"),
        ("too_few", "too many positional arguments"),
        ("god", "module data_generators has no 'god'; did you mean 'good'"),
        ("__name__", "is a str, not a function"),
    ],
)
def test_bad_generators(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_records(make_cfg(_target_=f"data_generators.{name}", eval_size=1), 0)
    assert f"data._target_=data_generators.{name}" in str(caught.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere_at_all.generate", "no module 'nowhere_at_all'"),
        ("generate", "must be an import path"),
        ("rollout.tasks.nowhere.generate", "no module 'rollout.tasks.nowhere'"),
    ],
)
def test_generators_that_cannot_be_imported(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"data._target_={target}: {message}"):
        load_records(make_cfg(_target_=target), 0)


def test_wrong_arguments_of_generators() -> None:
    target = "rollout.tasks.sort.generate"
    with pytest.raises(ConfigError, match=r"data.kwargs=\{'max_len': 3\}.*unexpected keyword argument 'max_len'"):
        load_records(make_cfg(_target_=target, kwargs={"max_len": 3}), 0)
    with pytest.raises(ConfigError, match=f"data._target_={target}, split 'train': min_length=9"):
        load_records(make_cfg(_target_=target, kwargs={"min_length": 9}), 0)


# Rendering


@pytest.mark.parametrize("adds_bos", [True, False])
def test_exactly_one_bos_with_a_template_that_writes_it(adds_bos: bool) -> None:  # B23
    (prompt,), dropped = render_prompts([{"prompt": "ab"}], make_cfg("x"), make_tokenizer(adds_bos=adds_bos), 100)
    assert prompt.token_ids == [BOS, *encode("user:ab\nassistant:")]
    assert prompt.token_ids.count(BOS) == 1 and dropped == 0


def test_exactly_one_bos_in_plain_text() -> None:  # B23
    (prompt,), _ = render_prompts(
        [{"prompt": "ab="}], make_cfg("x", template=Template.plain), make_tokenizer(None), 100
    )
    assert prompt.token_ids == [BOS, *encode("ab=")]


def load_demonstrations(
    cfg: DataConfig, sft: SftConfig, tokenizer: Any, count: int, seed: int
) -> list[tuple[list[int], list[int]]]:
    """As the warm start has them."""
    return draw_demonstrations(cfg, render_demonstrations(cfg, sft, tokenizer, count, seed), count, seed)


def test_one_bos_in_demonstrations(tmp_path: Path) -> None:  # B23
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "ab", "completion": "c"}])
    ((prompt, completion),) = load_demonstrations(make_cfg(path), SftConfig(), make_tokenizer(), 1, 0)
    assert prompt == [BOS, *encode("user:ab\nassistant:")] and completion == [*encode("c"), EOS]


def test_text_that_brings_a_second_bos_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"prompt 0: starts with '<bos>' twice: data.template=plain already writes it"
    ):
        render_prompts([{"prompt": "<bos>ab"}], make_cfg("x", template=Template.plain), make_tokenizer(), 100)


def test_messages_and_system_prompt() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    cfg = make_cfg("x", system_prompt="be good")
    prompts, _ = render_prompts([{"prompt": messages, "k": 1}, {"prompt": "d"}], cfg, make_tokenizer(), 100)
    assert prompts[0].token_ids == [BOS, *encode("user:a\nassistant:b\nuser:c\nassistant:")]
    assert prompts[1].token_ids == [BOS, *encode("system:be good\nuser:d\nassistant:")]
    assert prompts[0].record == {"prompt": messages, "k": 1}


def test_ids_that_are_also_pad_or_eos_stay() -> None:  # B27
    cfg = make_cfg("x", template=Template.plain)
    for pad in ("<eos>", "<pad>"):
        tokenizer = make_tokenizer(None, adds_bos=False, pad=pad)
        (prompt,), _ = render_prompts([{"prompt": "a<pad>b<eos>"}], cfg, tokenizer, 4)
        assert prompt.token_ids == [VOCAB["a"], PAD, VOCAB["b"], EOS]


def test_demonstrations_end_with_eos_also_where_it_is_pad(tmp_path: Path) -> None:  # B27
    records = [{"prompt": "a=", "completion": text} for text in ("b", "", "b<eos>")]
    cfg = make_cfg(write_jsonl(tmp_path / "p.jsonl", records), template=Template.plain, shuffle=False)
    for pad in ("<eos>", "<pad>"):
        drawn = load_demonstrations(cfg, SftConfig(), make_tokenizer(None, pad=pad), 3, 0)
        assert [completion for _, completion in drawn] == [[VOCAB["b"], EOS], [EOS], [VOCAB["b"], EOS]]


def test_overlong_prompts() -> None:
    records = [{"prompt": "ab"}, {"prompt": "abcdef"}, {"prompt": "abc"}]
    plain, tokenizer = {"template": Template.plain}, make_tokenizer()
    with pytest.raises(ConfigError, match="prompt 1: 7 tokens, and the room for a prompt is 4"):
        render_prompts(records, make_cfg("x", **plain), tokenizer, 4)
    prompts, dropped = render_prompts(records, make_cfg("x", drop_overlong=True, **plain), tokenizer, 4)
    assert ([prompt.index for prompt in prompts], dropped) == ([0, 2], 1)
    with pytest.raises(ConfigError, match="all 3 prompts are longer than the room of 2"):
        render_prompts(records, make_cfg("x", drop_overlong=True, **plain), tokenizer, 2)


def test_templates_that_do_not_fit() -> None:
    records = [{"prompt": "a"}]
    with pytest.raises(ConfigError, match=r"has no chat template; use data.template=plain or a model that has one"):
        render_prompts(records, make_cfg("x"), make_tokenizer(None), 100)
    refusing = make_tokenizer("{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match=r"prompt 0: the chat template refuses it: .*no system role"):
        render_prompts(records, make_cfg("x"), refusing, 100)
    plain = make_cfg("x", template=Template.plain, system_prompt="s")
    with pytest.raises(ConfigError, match=r"data.template=plain with data.system_prompt='s'"):
        render_prompts(records, plain, make_tokenizer(), 100)
    with pytest.raises(ConfigError, match=r"data.template=plain takes text"):
        render_prompts([{"prompt": [{}]}], make_cfg("x", template=Template.plain), make_tokenizer(), 100)
    with pytest.raises(ConfigError, match=r"prompt 0: 'prompt' is empty"):
        render_prompts([{"prompt": ""}], make_cfg("x", template=Template.plain), make_tokenizer(adds_bos=False), 100)


# Demonstrations


def test_demonstrations_from_generators() -> None:
    cfg = make_cfg(_target_="rollout.tasks.sort.generate", template=Template.plain)
    sft = SftConfig(kwargs={"corrupt": 0.0})
    drawn = load_demonstrations(cfg, sft, make_tokenizer(None, adds_bos=False), 50, 3)
    assert len(drawn) == 50
    equals = VOCAB["="]
    assert all(completion == [*sorted(prompt[:-1]), EOS] and prompt[-1] == equals for prompt, completion in drawn)
    assert drawn == load_demonstrations(cfg, sft, make_tokenizer(None, adds_bos=False), 50, 3)


def test_fewer_demonstrations_than_asked_repeat_evenly(tmp_path: Path) -> None:
    records = [{"prompt": f"{char}=", "completion": char} for char in "abcde"]
    cfg = make_cfg(write_jsonl(tmp_path / "p.jsonl", records), eval_size=1, template=Template.plain)
    drawn = load_demonstrations(cfg, SftConfig(), make_tokenizer(None), 12, 0)
    assert Counter(tuple(completion) for _, completion in drawn) == {(VOCAB[char], EOS): 3 for char in "abcd"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "completions": "b"}, "no column 'completion'; did you mean 'completions'"),
        ({"prompt": "a", "completion": None}, "'completion' is a NoneType, not a string"),
    ],
)
def test_bad_demonstrations(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    cfg = make_cfg(write_jsonl(tmp_path / "p.jsonl", [record]), template=Template.plain)
    with pytest.raises(ConfigError, match=f"record 0: {message}"):
        load_demonstrations(cfg, SftConfig(), make_tokenizer(None), 1, 0)


def test_demonstrations_need_eos_and_kwargs_a_generator(tmp_path: Path) -> None:
    cfg = make_cfg(write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "completion": "b"}]), template=Template.plain)
    with pytest.raises(ConfigError, match=r"sft.kwargs=\{'corrupt': 0\} with data.path="):
        load_demonstrations(cfg, SftConfig(kwargs={"corrupt": 0}), make_tokenizer(None), 1, 0)
    tokenizer = make_tokenizer(None)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no eos token"):
        load_demonstrations(cfg, SftConfig(), tokenizer, 1, 0)


# Tokenizers


def test_load_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(ConfigError, match=r"model.path=.*model: no such folder"):
        load_tokenizer(str(folder))
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"no config.json in it"):
        load_tokenizer(str(folder))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="no tokenizer in it"):
        load_tokenizer(str(folder))
    make_tokenizer().save_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    (prompt,), _ = render_prompts([{"prompt": "ab"}], make_cfg("x"), tokenizer, 100)
    assert prompt.token_ids == [BOS, *encode("user:ab\nassistant:")]
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded"):
        load_tokenizer(str(folder))
