"""vLLM with the connector in a process that answers lines, so that each test has a fresh engine and the options it
wants. Run by `tests.vllm.engines.Engine`.

Reads one JSON object per line and answers with a line that begins with the marker.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any


class Server:
    """What can be asked of the engine: every method is one kind of job."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**options)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.connector = self.core.scheduler.connector

    def generate(
        self, prompts: list[list[int]], max_tokens: int, salt: str | None = None, lora: list[Any] | None = None
    ) -> dict[str, Any]:
        """All prompts at once, greedily."""
        requests = [self._request(each, salt) for each in prompts]
        answers = self.llm.generate(requests, self._sampling(max_tokens), use_tqdm=False, lora_request=_lora(lora))
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        return {"tokens": tokens, "cached": [answer.num_cached_tokens or 0 for answer in answers]}

    def crowd(self, prompts: list[list[int]], max_tokens: int, aborts: dict[str, int]) -> dict[str, Any]:
        """All prompts at once; request i is aborted after `aborts[i]` steps. Gives the answers of the others."""
        engine, sampling = self.llm.llm_engine, self._sampling(max_tokens)
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), self._request(prompt, None), sampling)
        answers: dict[str, Any] = {}
        steps, preempted = 0, 0
        while engine.has_unfinished_requests():
            for answer in engine.step():
                if answer.finished and answer.outputs[0].finish_reason != "abort":
                    answers[answer.request_id] = list(answer.outputs[0].token_ids)
            steps += 1
            preempted += sum(each.num_preemptions > 0 for each in self.core.scheduler.requests.values())
            engine.abort_request([index for index, step in aborts.items() if step == steps])
        free = self._all_free()
        return {"tokens": answers, "preempted": preempted, "free": free}

    def _all_free(self) -> bool:
        """Whether every block is free again, once the engine has run a few empty steps."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        until = time.monotonic() + 20
        while time.monotonic() < until and (
            pool.get_num_free_blocks() != pool.num_gpu_blocks - 1 or self.core.scheduler.requests
        ):
            self.core.step_fn()
        return pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 and not self.core.scheduler.requests

    def reset(self, connector: bool = False) -> bool:
        """Empties vLLM's own prefix cache, and the pool if asked for."""
        return bool(self.llm.reset_prefix_cache(reset_connector=connector))

    def settle(self) -> bool:
        """Waits until everything is stored."""
        self.connector.host.settle()
        return True

    def stats(self) -> dict[str, Any]:
        """Counters of the connector since the start, and of the tiers."""
        tiers = self.connector.host.stats()
        counters = self.connector.host.counters.totals()
        return {"counters": counters, "tiers": {name: tiers[name]["items"] for name in tiers}}

    def metrics(self) -> dict[str, float]:
        """vLLM's own metrics: those that are one number."""
        return {each.name: each.value for each in self.llm.get_metrics() if hasattr(each, "value")}

    def blocks(self, prompt: list[int]) -> list[str]:
        """Digests of the full blocks of a prompt that vLLM's own prefix cache has."""
        from vllm.v1.request import Request

        scheduler = self.core.scheduler
        hasher = self.core.request_block_hasher
        request = Request("probe", [*prompt, 1], self._sampling(1), None, block_hasher=hasher)
        found = scheduler.kv_cache_manager.get_computed_blocks(request)[0]
        ids = found.get_block_ids()[0]
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        layout = get_kv_transfer_group()._worker._layout
        return [hashlib.sha256(block.tobytes()).hexdigest() for block in layout.copy_out(ids)] if ids else []

    @staticmethod
    def _request(prompt: list[int], salt: str | None) -> dict[str, Any]:
        request: dict[str, Any] = {"prompt_token_ids": prompt}
        return request if salt is None else {**request, "cache_salt": salt}

    @staticmethod
    def _sampling(max_tokens: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def _lora(lora: list[Any] | None) -> Any:
    from vllm.lora.request import LoRARequest

    return None if lora is None else LoRARequest(*lora)


def main() -> None:
    options = json.loads(sys.argv[1])
    marker = options.pop("marker")
    try:
        server = Server(options)
    except Exception as error:
        print(marker, json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        raise
    print(marker, json.dumps({"answer": "ready"}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        answer = getattr(server, job.pop("do"))(**job)
        print(marker, json.dumps({"answer": answer}), flush=True)
    server.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
