"""Log-probabilities of a row by real engines that load folders with vLLM's own `load_format=sharded_state`.

    python -m tests.integration.sharded_state ROW FOLDER:TP:PP...

ROW is JSON; prints a JSON list of each folder's [len(ROW) - 1] log-probabilities. A process of its own, as an engine
keeps what it has set up.
"""

import json
import os
import sys


def main(row: list[int], folders: list[str]) -> None:
    # As rollout.engines sets them: vLLM's own process for an engine, and one core for each worker, are not wanted.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1")
    from vllm import LLM, SamplingParams

    found = []
    for text in folders:
        folder, tp, pp = text.rsplit(":", 2)
        llm = LLM(
            folder,
            load_format="sharded_state",
            tensor_parallel_size=int(tp),
            pipeline_parallel_size=int(pp),
            distributed_executor_backend="mp" if int(tp) * int(pp) > 1 else None,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=2,
            kv_cache_memory_bytes=16 << 20,
            enforce_eager=True,
            disable_log_stats=True,
        )
        settings = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": row}], settings, use_tqdm=False)
        told = output.prompt_logprobs[1:]
        found.append([entry[token].logprob for entry, token in zip(told, row[1:], strict=True)])
        llm.llm_engine.engine_core.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
