"""Stand-ins for agents: a tokenizer of characters with a chat template, engines that say what they are told to."""

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl.types import Completion, Sampling
from rollout.engine import Outcome

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Leaves the thinking of earlier turns out, as some templates do.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1].strip() }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>")
# Words beside characters: a text has several encodings, and what is sampled need not be the one that encoding gives.
WORDS = ("high", "low", "er")


def chat_tokenizer(template: str = CHATML) -> Any:
    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    names = [*SPECIAL, *characters, *WORDS]
    core = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


Say = Callable[[list[int], int], str | list[int] | Exception]


class ScriptedLane:
    """An engine that answers each prompt with what `say(prompt_ids, number of the call)` gives: text or ids."""

    def __init__(self, tokenizer: Any, say: Say | Sequence[str], version: int = 3):
        self.tokenizer, self.version = tokenizer, version
        self.say: Say = say if callable(say) else lambda _ids, call: say[call]
        self.seen: list[list[int]] = []
        self.sampled: list[list[int]] = []
        self.samplings: list[Sampling] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling) -> Outcome:
        said = self.say(prompt_ids, len(self.seen))
        self.seen.append(list(prompt_ids))
        self.samplings.append(sampling)
        if isinstance(said, Exception):
            return Outcome(request_id="r", error=str(said))
        ids = said if isinstance(said, list) else [*encode(self.tokenizer, said), self.tokenizer.eos_token_id]
        cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        self.sampled.append(ids)
        completion = Completion(
            prompt_ids=list(prompt_ids),
            token_ids=ids,
            logprobs=[-0.5 - n for n in range(len(ids))],
            finish_reason="length" if cut else "stop",
            versions=[self.version] * len(ids),
            ttft_s=0.0,
            decode_s=0.0,
        )
        return Outcome(request_id="r", completion=completion)


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
