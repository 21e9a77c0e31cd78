"""Hugging Face's side of step.py, a separate process: work_hf.py WORK MODEL OUT OURS writes one JSON file.

``generate`` of transformers on the same prompts, each repeated for its completions; they end where ours did. At
bfloat16 the weights are bfloat16, which is quicker than autocast.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from work import Clock, EndAt, Load, Watch, Work, texts


def main() -> None:
    work, folder, out = Work.read(Path(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    ours = json.loads(Path(sys.argv[4]).read_text())["rollouts"]
    if work.threads:
        torch.set_num_threads(work.threads)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, work.dtype)).to(work.device).eval()
    end = work.shape["vocab_size"] - 1
    watch, clock = Watch(work.device), Clock(work.device)
    steps = []
    for number in range(1 + work.steps):
        start, load = clock.time(), Load()
        prompts = texts(work)[number * work.prompts : (number + 1) * work.prompts]
        inputs = tokenizer([p for p in prompts for _ in range(work.group)], return_tensors="pt").to(work.device)
        lengths = [len(row) for group in ours[number] for row in group]
        with clock.phase("generate"), torch.no_grad():
            ids = model.generate(
                **{k: inputs[k] for k in ("input_ids", "attention_mask")}, max_new_tokens=work.completion_tokens,
                do_sample=not work.greedy, temperature=None if work.greedy else 1.0, top_k=0, top_p=1.0,
                pad_token_id=end, eos_token_id=end if work.ragged else end + 1,
                logits_processor=[EndAt(lengths, prompt_tokens=work.prompt_tokens, end=end)] if work.ragged else [],
            )  # fmt: skip
            completions = ids[:, work.prompt_tokens :].tolist()
            tokenizer.batch_decode([row[:n] for row, n in zip(completions, lengths, strict=True)])
        made = sum(row.index(end) + 1 if work.ragged else len(row) for row in completions)
        phases = clock.take() | {"total": clock.time() - start}
        seen = {"prompt_tokens": inputs["input_ids"].numel(), "completion_tokens": made}
        steps.append({"phases": phases, **seen, "foreign_cpu": load.foreign()})
    out.write_text(json.dumps({"steps": steps, **watch.result()}))


if __name__ == "__main__":
    main()
