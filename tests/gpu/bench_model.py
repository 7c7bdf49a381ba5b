"""Parts of the benchmark that run a whole model: decoding, and the time to the first token cold and restored."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from kitelib.abc import SequenceId, StepWork, TokenDraw
from kitelib.backends.torch_engine.forward import Forward, probe_layers
from kitelib.backends.torch_engine.graphed import decode_graphs
from kitelib.backends.torch_engine.packing import RowPlan
from kitelib.backends.torch_engine.pages import PagedCache
from tests.gpu.bench_memory import DEVICE_COPY, make_kernel
from tests.gpu.bench_report import Report, seconds, wait_for
from tests.gpu.missing import stand_in

with stand_in("zstandard"):
    from kitelib.backends.torch_engine.device_runner import DeviceRunner

__all__ = ["BATCHES", "EightB"]

BATCHES = (1, 16, 64, 256)
_GREEDY = TokenDraw(0.0, 0, 1.0, 0.0, 0.0)


class EightB:
    """A model of the shape of Llama 3 8B with random bfloat16 weights, made on the device, and the engine's runner."""

    def __init__(self, report: Report) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        from kitelib.backends.torch_engine.attention import ATTENTION, register_attention

        device, tiny = report.device, report.tiny
        self.report = report
        self.batches = (1, 3) if tiny else BATCHES
        self.prompt_tokens, self.new_tokens = (20, 4) if tiny else (512, 64)
        self.drafts = (4, 8)
        self.lengths = (64, 200) if tiny else (1024, 8192, 32_768)
        self.context = max(self.lengths) + 64
        sizes: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
        sizes |= {"vocab_size": 128_256, "num_attention_heads": 32, "num_key_value_heads": 8}
        if tiny:
            sizes |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
            sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = AutoConfig.for_model(
            "llama", max_position_embeddings=65_536, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, **sizes
        )
        register_attention()
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=ATTENTION
            ).eval()
        self.model.requires_grad_(False)
        self.vocab_size = sizes["vocab_size"]
        layers = probe_layers(self.model, "the model of the benchmark")
        held = max(self.batches) * (self.prompt_tokens + 2 * self.new_tokens)
        num_blocks = -(-max(held, self.context) // 16) + max(self.batches)
        self.cache = PagedCache(layers, num_blocks, 16, torch.bfloat16, device)
        self.cache.arena.normal_()
        forward = Forward(self.model, latent=False)
        kernel = make_kernel(device, bitwise=False, max_context=self.context)
        rows = RowPlan(1, 64 if tiny else 4096)
        self.rows = rows.max_rows
        self.runner = DeviceRunner(forward, self.cache, kernel, rows, 2 * max(self.batches))
        self.runner.graphs = decode_graphs(
            forward, self.cache, kernel, rows, max_rows=max(32, *self.batches), max_context=self.context
        )
        embedding = self.model.get_input_embeddings().weight
        self.weight_bytes = sum(each.nbytes for each in self.model.parameters()) - embedding.nbytes
        self.token_bytes = self.cache.arena[0].nbytes // 16

    def decode(self, report: Report) -> None:
        """Tokens per second, host work included, beside the time that reading weights and KV takes at least."""
        begin = time.perf_counter()
        assert self.runner.graphs is not None
        self.runner.graphs.warm()
        wait_for(report.device)
        report.add("capturing the graphs of all sizes of batch", time.perf_counter() - begin, "s")
        bandwidth = report.figures[DEVICE_COPY] * 1e9
        for batch in self.batches:
            average = self.prompt_tokens + self.new_tokens + self.new_tokens / 2
            least = (self.weight_bytes + batch * average * self.token_bytes) / bandwidth
            taken = self._decode(batch)
            name = f"decode, batch {batch} after {self.prompt_tokens} tokens"
            report.add(name, batch / taken, "tokens/s", (batch / least, f"roofline {batch / least:,.0f}"))

    def _decode(self, batch: int) -> float:
        """Seconds per step."""
        tables = self.runner.tables
        sequences = [tables.create(None) for _ in range(batch)]
        for sequence in sequences:
            tables.extend(sequence, self.prompt_tokens)  # whatever the cache holds there
        tokens = [3] * batch
        tokens = self._steps(sequences, tokens, self.new_tokens)
        wait_for(self.report.device)
        begin = time.perf_counter()
        self._steps(sequences, tokens, self.new_tokens)
        taken = (time.perf_counter() - begin) / self.new_tokens
        for sequence in sequences:
            tables.release(sequence)
        return taken

    def _steps(self, sequences: list[SequenceId], tokens: list[int], count: int) -> list[int]:
        for _ in range(count):
            work = [
                StepWork(each, [token], self.runner.tables[each].num_tokens, False, (_GREEDY,))
                for each, token in zip(sequences, tokens, strict=True)
            ]
            tokens = [token for (token,) in self.runner.step(work).tokens]
        return tokens

    def verify(self, report: Report) -> None:
        """A step that verifies drafts beside one that decodes: whether it goes through a graph depends on its rows."""
        assert self.runner.graphs is not None
        for batch in self.batches[:2]:
            sequences = [self.runner.tables.create(None) for _ in range(batch)]
            for sequence in sequences:
                self.runner.tables.extend(sequence, self.prompt_tokens)  # whatever the cache holds there
            taken = {drafts: self._verifying(sequences, drafts) for drafts in (0, *self.drafts)}
            for drafts in self.drafts:
                name = f"verifying {drafts} drafts, batch {batch} after {self.prompt_tokens} tokens"
                report.add(name, 1e3 * taken[drafts], "ms", (1e3 * taken[0], "a decode step"))
            for sequence in sequences:
                self.runner.tables.release(sequence)

    def _verifying(self, sequences: list[SequenceId], drafts: int) -> float:
        """Seconds of a step with so many drafts of each sequence, of which none is taken."""
        draws, tokens = (_GREEDY,) * (1 + drafts), [3] * (1 + drafts)
        work = [StepWork(each, tokens, self.prompt_tokens, False, draws, drafts) for each in sequences]

        def once() -> None:
            self.runner.step(work)
            for each in sequences:
                self.runner.truncate(each, self.prompt_tokens)

        return seconds(once, self.report.device, runs=5, inner=self.new_tokens // 4)

    def first_token(self, report: Report) -> None:
        """Seconds until the logits after a prompt are on the host: computed, and with its blocks from payloads."""
        random = torch.Generator().manual_seed(7)
        for length in self.lengths:
            tokens = torch.randint(2, self.vocab_size, (length,), generator=random).tolist()
            _, first = self._cold(tokens)  # may compile kernels of a shape that was not there before
            sequence, cold = self._cold(tokens, keep=True)
            cold = min(first, cold)
            blocks = (length - 1) // 16
            payloads = self.runner.export(sequence, 0, blocks, blocks * 16)
            self.runner.tables.release(sequence)
            restored = []
            for _ in range(2):
                wait_for(report.device)
                begin = time.perf_counter()
                sequence = self.runner.tables.create(None)
                self.runner.restore(sequence, 0, payloads)
                self._prefill(sequence, tokens, blocks * 16)
                restored.append(time.perf_counter() - begin)
                self.runner.tables.release(sequence)
            report.add(f"first token after {length} tokens, computed", cold, "s")
            name = f"first token after {length} tokens, restored"
            report.add(name, min(restored), "s", (cold, "computed"))

    def _cold(self, tokens: list[int], *, keep: bool = False) -> tuple[SequenceId, float]:
        wait_for(self.report.device)
        begin = time.perf_counter()
        sequence = self.runner.tables.create(None)
        self._prefill(sequence, tokens, 0)
        taken = time.perf_counter() - begin
        if not keep:
            self.runner.tables.release(sequence)
        return sequence, taken

    def _prefill(self, sequence: SequenceId, tokens: list[int], start: int) -> None:
        for first in range(start, len(tokens), self.rows):
            part = tokens[first : first + self.rows]
            result = self.runner.step([StepWork(sequence, part, first, first + len(part) == len(tokens))])
        assert result.logits[0] is not None

    def free_cache(self) -> None:
        """Makes room for the other library; nothing of this one runs afterwards."""
        del self.runner, self.cache
        gc.collect()
        if self.report.device.type == "cuda":
            torch.cuda.empty_cache()

    def rival(self, report: Report, batch: int, *, compiled: bool) -> None:
        """`generate` of transformers with a static cache, on the same weights."""
        self.model.set_attn_implementation("sdpa")
        ids = torch.randint(2, self.vocab_size, (batch, self.prompt_tokens), device=report.device)
        begin = time.perf_counter()
        self._generate(ids, compiled)  # compiles, if at all
        warm_up = time.perf_counter() - begin
        times = self._generate(ids, compiled)
        name = f"transformers {'compiled' if compiled else 'eager'} static cache, batch {batch}"
        rate = batch * (len(times) - 2) / (times[-1] - times[1])  # the first token is the prompt's
        ours = report.figures.get(f"decode, batch {batch} after {self.prompt_tokens} tokens")
        report.add(name, rate, "tokens/s", (ours, "ours") if ours else None)
        if compiled:
            report.add(f"transformers compiled, warm-up at batch {batch}", warm_up, "s")

    def _generate(self, ids: torch.Tensor, compiled: bool) -> list[float]:
        """When each new token was there. `generate` waits for the device after each one by itself."""
        times: list[float] = []

        def note(input_ids: torch.Tensor, _scores: torch.Tensor, **_options: Any) -> torch.Tensor:
            wait_for(self.report.device)
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.new_tokens,
                min_new_tokens=self.new_tokens,
                do_sample=False,
                cache_implementation="static",
                disable_compile=not compiled,
                stopping_criteria=[note],
            )
        assert len(times) == self.new_tokens
        return times
