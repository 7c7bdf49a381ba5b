"""vLLM on the CPU as a process that answers lines: run by the Python of vLLM's own environment, see torch_rivals.py.

Reads one JSON object per line, {"prompts": [[token, ...], ...], "max_tokens": n}, and answers with a line that begins
with the marker: {"seconds": s, "tokens": n}.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    options = json.loads(sys.argv[1])
    marker = options.pop("marker")
    llm = LLM(**options)
    print(marker, json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        begin = time.perf_counter()
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
        print(marker, json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
