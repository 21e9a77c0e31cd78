"""vLLM's side of step.py, a separate process: work_vllm.py WORK MODEL OUT OURS writes one JSON file.

The build of vLLM for CPUs, through its Python class in this process: token ids in and out, one request per group, and
the log-prob of every sampled token.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from transformers import AutoTokenizer

from work import Clock, Load, Watch, Work, texts

CACHE_GIB = 4
"""Room for keys and values: enough for all sequences of a step at once."""


def main() -> None:
    work, folder, out = Work.read(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    threads = work.threads or len(os.sched_getaffinity(0))
    # Read when vLLM is imported. Its own choice of cores leaves one of them to a server's other processes.
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads),
    }  # fmt: skip
    from vllm import LLM, SamplingParams

    model = LLM(
        str(folder), dtype=work.dtype, max_model_len=work.prompt_tokens + work.completion_tokens, seed=0,
        max_num_seqs=work.sequences, logprobs_mode="processed_logprobs", generation_config="vllm",
        enable_chunked_prefill=False,  # with seeds, this build ends where it reads a prompt in parts
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    watch, clock = Watch(work.device), Clock(work.device)
    steps = []
    for number in range(1 + work.steps):
        start, load = clock.time(), Load()
        prompts = tokenizer(texts(work)[number * work.prompts : (number + 1) * work.prompts])["input_ids"]
        how = SamplingParams(
            n=work.group, max_tokens=work.completion_tokens, temperature=0.0 if work.greedy else 1.0, ignore_eos=True,
            seed=number, logprobs=0,
        )  # fmt: skip
        with clock.phase("generate"):
            answers = model.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
        made = [choice for answer in answers for choice in answer.outputs]
        assert all(len(choice.logprobs) == len(choice.token_ids) for choice in made)
        phases = clock.take() | {"total": clock.time() - start}
        seen = {"prompt_tokens": work.group * sum(map(len, prompts)),
                "completion_tokens": sum(len(choice.token_ids) for choice in made)}  # fmt: skip
        steps.append({"phases": phases, **seen, "foreign_cpu": load.foreign()})
    out.write_text(json.dumps({"steps": steps, **watch.result()}))


if __name__ == "__main__":
    main()
