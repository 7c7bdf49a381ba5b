"""A loaded GGUF model: weights, vocabulary, adapters."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kitelib.backends.chat_template import ChatTemplate
from kitelib.backends.digest import content_digest, file_state
from kitelib.backends.llama_cpp.gguf import GGUFSummary, check_file, split_paths
from kitelib.backends.llama_cpp.library import captured_errors, load_library
from kitelib.backends.llama_cpp.model_state import weights_digest
from kitelib.backends.llama_cpp.runs import MAX_RUN_CHARS, cut_long_runs
from kitelib.config import AdapterConfig
from kitelib.errors import (
    BackendError,
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    KiteError,
    ModelFormatError,
    UnsupportedOptionError,
)

__all__ = ["GGUFModel", "LoadedAdapter"]

Progress = Callable[[float], None]

_PIECE_BYTES = 64  # enough for nearly every token
_MEMORY_WORDS = ("allocate", "memory", "mmap", "bad_alloc")


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """One LoRA adapter of a loaded model.

    Attributes:
        handle: llama_adapter_lora pointer; freed with the model.
        digest: SHA-256 of the adapter file's content, 32 bytes.
        scale: factor to apply it with.
    """

    handle: Any
    digest: bytes
    scale: float


class GGUFModel:
    """A decoder-only model in memory, on the CPU. Make one with `load`, end it with `close`.

    Tokenizing and detokenizing are thread-safe. Weights are memory-mapped by default: don't overwrite the file in
    place while it is open (replacing it by renaming another file over it is fine).

    Attributes:
        handle, vocab: llama_model and llama_vocab pointers; contexts must be freed before `close`.
        path, name, architecture: from the file; the name is for people.
        summary: everything the header says.
        n_vocab, n_ctx_train, n_layer, n_head: sizes; n_ctx_train in tokens.
        n_params: number of weights.
        n_swa: sliding attention window, tokens; 0 if there is none.
        is_recurrent, is_hybrid: whether all or some layers keep a recurrent state instead of KV.
        end_token_ids: all token ids that end a text.
        bos_id: token id that begins a text; None if there is none.
        add_bos: whether the model wants `bos_id` before a text.
        chat_template, tool_template: Jinja sources from the file, or None; the second is for requests with tools.
        weights_digest: SHA-256 over the content of the model's file or files, 32 bytes.
        adapters: name -> `LoadedAdapter`.
    """

    def __init__(self, library: Any, handle: Any, summary: GGUFSummary, weights_digest: bytes) -> None:
        self._library = library
        self._idle = threading.Condition()
        self._users = 0
        self.handle = handle
        self.vocab = library.llama_model_get_vocab(handle)
        self.summary = summary
        self.path, self.name, self.architecture = summary.path, summary.name, summary.architecture
        self.weights_digest = weights_digest
        self.adapters: dict[str, LoadedAdapter] = {}
        self.n_vocab: int = library.llama_vocab_n_tokens(self.vocab)
        self.n_ctx_train: int = library.llama_model_n_ctx_train(handle) or int(
            summary.of_architecture("context_length") or 0
        )
        self.n_layer: int = library.llama_model_n_layer(handle)
        self.n_head: int = library.llama_model_n_head(handle) if self.n_layer else 0
        self.n_params: int = library.llama_model_n_params(handle)
        self.n_swa: int = library.llama_model_n_swa(handle)
        self.is_recurrent: bool = library.llama_model_is_recurrent(handle)
        self.is_hybrid: bool = library.llama_model_is_hybrid(handle)
        is_end = library.llama_vocab_is_eog
        self.end_token_ids = frozenset(token for token in range(self.n_vocab) if is_end(self.vocab, token))
        bos: int = library.llama_vocab_bos(self.vocab)
        self.bos_id = bos if 0 <= bos < self.n_vocab else None
        self.add_bos: bool = self.bos_id is not None and library.llama_vocab_get_add_bos(self.vocab)
        template = summary.metadata.get("tokenizer.chat_template")
        tool_template = summary.metadata.get("tokenizer.chat_template.tool_use")
        self.chat_template = template if isinstance(template, str) and template else None
        self.tool_template = tool_template if isinstance(tool_template, str) and tool_template else None
        self._splits_by_regex = summary.metadata.get("tokenizer.ggml.model") == "gpt2"
        self._pieces: list[bytes | None] = [None] * self.n_vocab

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        adapters: Mapping[str, AdapterConfig] | None = None,
        progress: Progress | None = None,
        use_mmap: bool = True,
        vocab_only: bool = False,
        identify: bool = True,
        cache_dir: pathlib.Path | None = None,
    ) -> GGUFModel:
        """Checks, identifies and loads a model. Blocks: seconds per GB when the file is not in the page cache.

        Args:
            path: GGUF file; for a split model, its first file.
            adapters: name -> LoRA adapter to load with it.
            progress: called with the fraction done, 0 to 1, on the calling thread; what it raises stops the load and
                comes out of this call.
            use_mmap: map the weights instead of reading them into memory.
            vocab_only: load the vocabulary without weights: enough to tokenize.
            identify: read the content for `weights_digest`, which is b"" otherwise: tokenizing needs none.
            cache_dir: where content digests are remembered; None means the user's cache folder.

        Raises:
            ModelNotFoundError: no such file.
            ModelFormatError: corrupt, truncated, unknown to this llama.cpp, or not a decoder-only language model.
            BackendError: the library can't be used, or memory is short.
            ConfigError: an adapter's scale makes no sense.
            MissingExtraError: llama-cpp-python is not installed.
        """
        summary = check_file(path)
        _refuse_other_kinds(summary, vocab_only)
        files = split_paths(summary)
        for file in files[1:]:
            check_file(file)
        library = load_library()
        before = [file_state(file) for file in files]
        digest = weights_digest(files, cache_dir, _part(progress, 0.0, 0.5)) if identify else b""
        handle = _load_weights(library, summary, _part(progress, 0.5, 1.0), use_mmap, vocab_only)
        try:
            _check_unchanged(files, before)
            _refuse_other_models(library, handle, summary)
            model = cls(library, handle, summary, digest)
            for name, config in (adapters or {}).items():
                model.adapters[name] = _load_adapter(library, model, name, config, cache_dir)
        except BaseException:
            library.llama_model_free(handle)
            raise
        return model

    def close(self) -> None:
        """Frees the weights and adapters, after running calls have ended. Idempotent."""
        with self._idle:
            handle, self.handle = self.handle, None
            self._idle.wait_for(lambda: self._users == 0)
            self.adapters.clear()
        if handle is not None:
            self._library.llama_model_free(handle)

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Keeps the vocabulary alive during a call into the library."""
        with self._idle:
            if self.handle is None:
                raise EngineClosedError(f"the model {self.name!r} is closed; load it again")
            self._users += 1
        try:
            yield
        finally:
            with self._idle:
                self._users -= 1
                self._idle.notify_all()

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any text; NUL characters are kept.
            add_special: add BOS, EOS and the like where the model asks for them.
            parse_special: text such as ``<|im_start|>`` becomes the special token of that name. This is what callers
                expect of prompts, also hand-written ones, but it lets text from a third party forge turns of a
                chat. A chat rendered to one text can't tell the two apart; applications that must not be
                forged should tokenize foreign text with False and pass token ids.

        Vocabularies of the SentencePiece kind may put a space before the text (``tokenizer.ggml.add_space_prefix``);
        it then comes back from `detokenize`. Bytes for which a vocabulary has no token are lost.

        Raises:
            InvalidRequestError: the text holds lone surrogates, or is 2 GiB or longer.
        """
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text holds {text[error.start]!r} at index {error.start}, half of a surrogate pair, which has no UTF-8 "
                "form; decode the text with errors='replace'"
            ) from error
        if len(data) >= 2**31 - 16:
            raise InvalidRequestError(f"the text has {len(data)} bytes; fewer than 2 GiB can be tokenized")
        if not self._splits_by_regex or len(text) <= MAX_RUN_CHARS:
            return self._tokenize(data, add_special, parse_special)
        around = self._tokenize(b"", add_special, parse_special)  # what goes before and after any text
        tokens = around[: int(self.add_bos)]
        for piece in cut_long_runs(text):
            tokens += self._tokenize(piece.encode("utf-8"), False, parse_special)
        return tokens + around[int(self.add_bos) :]

    def _tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        capacity = len(data) + 8  # a token spans at least a byte, special tokens and a space prefix apart
        with self._using():
            while True:
                tokens = (ctypes.c_int32 * capacity)()
                count = self._library.llama_tokenize(
                    self.vocab, data, len(data), tokens, capacity, add_special, parse_special
                )
                if count >= 0:
                    return tokens[:count]
                if count == -(2**31) or -count <= capacity:
                    raise BackendError(f"llama.cpp could not tokenize a text of {len(data)} bytes (code {count})")
                capacity = -count

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token adds to a text, maybe part of a character; b"" for special tokens.

        Raises:
            InvalidRequestError: no such token.
        """
        self._check(token)
        piece = self._pieces[token]
        if piece is None:
            with self._using():
                piece = self._piece(token, False, ctypes.create_string_buffer(_PIECE_BYTES))
            self._pieces[token] = piece
        return piece

    def detokenize(self, tokens: Iterable[int]) -> bytes:
        """The concatenated `token_bytes`, so that a text is the same streamed or whole."""
        return b"".join(map(self.token_bytes, tokens))

    def vocab_bytes(self) -> list[bytes]:
        """`token_bytes` of every token, in order of ids; the first call takes about 1 us per token."""
        buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        with self._using():
            for token, piece in enumerate(self._pieces):
                if piece is None:
                    self._pieces[token] = self._piece(token, False, buffer)
        return [piece or b"" for piece in self._pieces]

    def token_text(self, token: int) -> str:
        """The token for people: special tokens by name, parts of characters as U+FFFD."""
        self._check(token)
        with self._using():
            piece = self._piece(token, True, ctypes.create_string_buffer(_PIECE_BYTES))
        return piece.decode("utf-8", "replace")

    def template(self) -> ChatTemplate:
        """The chat template of the file, with the texts of its special tokens."""
        eos = int(self._library.llama_vocab_eos(self.vocab))
        return ChatTemplate(
            self.chat_template,
            "" if self.bos_id is None else self.token_text(self.bos_id),
            self.token_text(eos) if eos >= 0 else "",
            add_bos=self.add_bos,
            tool_source=self.tool_template,
        )

    def _check(self, token: int) -> None:
        # The library ends the process on ids out of range.
        if not 0 <= token < self.n_vocab:
            raise InvalidRequestError(
                f"token id {token} does not exist; the vocabulary has ids 0 to {self.n_vocab - 1}"
            )

    def _piece(self, token: int, special: bool, buffer: ctypes.Array[ctypes.c_char]) -> bytes:
        while True:
            size = len(buffer)
            count: int = self._library.llama_token_to_piece(self.vocab, token, buffer, size, 0, special)
            if count >= 0:
                return ctypes.string_at(buffer, count)
            buffer = ctypes.create_string_buffer(-count)


def _part(progress: Progress | None, start: float, end: float) -> Progress | None:
    if progress is None:
        return None
    return lambda fraction: progress(start + (end - start) * fraction)


def _check_unchanged(files: Sequence[pathlib.Path], before: Sequence[Mapping[str, int]]) -> None:
    """Raises if a file is not what its digest was made of."""
    for file, state in zip(files, before, strict=True):
        if file_state(file) != state:
            raise ModelFormatError(f"{str(file)!r} changed while it was loaded; open it when it is complete")


def _refuse_other_kinds(summary: GGUFSummary, vocab_only: bool) -> None:
    """Raises for files that are no language model at all, told by their header."""
    name = repr(str(summary.path))
    if summary.kind == "adapter":
        raise ModelFormatError(f"{name} is a LoRA adapter; open its base model and give this file in adapters=")
    if summary.kind != "model" or summary.architecture == "clip":
        what = summary.kind if summary.kind != "model" else summary.architecture
        raise ModelFormatError(
            f"{name} is a GGUF file of kind {what!r}, not a language model; give the model's own file"
        )
    if summary.num_tensors == 0 and not vocab_only:
        raise ModelFormatError(f"{name} holds a vocabulary but no weights; give a file with weights")


def _refuse_other_models(library: Any, handle: Any, summary: GGUFSummary) -> None:
    """Raises for models that don't predict the next token of a text from the ones before it."""
    reason = None
    if library.llama_model_has_encoder(handle) or not library.llama_model_has_decoder(handle):
        reason = "has an encoder"
    elif library.llama_model_is_diffusion(handle):
        reason = "generates by diffusion"
    elif summary.of_architecture("attention.causal") is False or summary.of_architecture("pooling_type"):
        reason = "computes embeddings"
    if reason is not None:
        raise ModelFormatError(
            f"{str(summary.path)!r} (architecture {summary.architecture!r}) {reason}; only decoder-only language models "
            "can be run"
        )


def _load_weights(
    library: Any, summary: GGUFSummary, progress: Progress | None, use_mmap: bool, vocab_only: bool
) -> Any:
    raised: list[BaseException] = []

    def on_progress(fraction: float, _user_data: object) -> bool:
        try:
            if progress is not None:
                progress(min(1.0, fraction))
        except BaseException as error:  # noqa: BLE001  must not unwind through C++; raised again below
            raised.append(error)
            return False
        return True

    params = library.llama_model_default_params()
    no_devices = (ctypes.c_void_p * 1)(None)  # an empty list, so that builds with a GPU stay on the CPU too
    callback = library.llama_progress_callback(on_progress)
    params.devices = ctypes.cast(no_devices, ctypes.c_void_p)
    params.n_gpu_layers = 0
    params.load_mode = library.LLAMA_LOAD_MODE_MMAP if use_mmap else library.LLAMA_LOAD_MODE_NONE
    params.vocab_only = vocab_only
    params.progress_callback = callback
    with captured_errors() as errors:
        handle = library.llama_model_load_from_file(os.fsencode(summary.path), params)
    if raised:
        if handle:
            library.llama_model_free(handle)
        raise raised[0]
    if not handle:
        raise _load_error(f"the model {str(summary.path)!r}", errors)
    return handle


def _load_error(what: str, errors: Iterable[str]) -> KiteError:
    """The exception for a load that llama.cpp refused, with its own last words."""
    reasons = [line.partition("error loading model: ")[2] or line for line in errors]
    reason = "; ".join(reasons[-3:]) or "it gave no reason"
    if any(word in reason.lower() for word in _MEMORY_WORDS):
        return BackendError(f"{what} can't be loaded: {reason}; free some memory, or use a smaller model")
    return ModelFormatError(
        f"llama.cpp refuses {what}: {reason}; if the file is not damaged, a newer llama-cpp-python may know it"
    )


def _load_adapter(
    library: Any, model: GGUFModel, name: str, config: AdapterConfig, cache_dir: pathlib.Path | None
) -> LoadedAdapter:
    what = f"the adapter {name!r} ({config.path!r})"
    if not math.isfinite(config.scale):
        raise ConfigError(f"{what} has scale {config.scale}; give a finite number")
    summary = check_file(config.path)
    kind = summary.metadata.get("adapter.type")
    if summary.kind != "adapter" or kind != "lora":
        raise ModelFormatError(
            f"{what} is a GGUF file of kind {summary.kind!r}{f' and type {kind!r}' if kind else ''}, not a LoRA adapter"
        )
    if summary.architecture != model.architecture:
        raise ModelFormatError(
            f"{what} was made for architecture {summary.architecture!r}, the model has {model.architecture!r}"
        )
    before = [file_state(config.path)]
    digest = content_digest(config.path, cache_dir)
    with captured_errors() as errors:
        handle = library.llama_adapter_lora_init(model.handle, os.fsencode(config.path))
    if not handle:
        raise _load_error(what, errors)
    _check_unchanged([summary.path], before)
    if library.llama_adapter_get_alora_n_invocation_tokens(handle):
        raise UnsupportedOptionError(
            f"{what} is an activated LoRA, which applies from a trigger on only; use a plain LoRA adapter"
        )
    return LoadedAdapter(handle, digest, float(config.scale))
