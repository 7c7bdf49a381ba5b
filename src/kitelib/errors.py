"""Every exception that kitelib raises on purpose.

The tree says who has to act::

    KiteError
    +-- RequestError                 the caller's fault, or the caller's limits
    |   +-- InvalidRequestError      (also ValueError) the arguments make no sense
    |   |   +-- EmptyPromptError
    |   |   +-- PromptTooLongError
    |   |   +-- InvalidSamplingError
    |   |   +-- UnknownAdapterError
    |   +-- ConfigError              (also ValueError) an option or a configuration key is wrong
    |   |   +-- UnsupportedOptionError   the option exists, this backend or model does not have it
    |   +-- MissingExtraError        (also ImportError) an optional dependency is not installed
    |   +-- EngineClosedError        the engine was closed
    |   +-- EngineOverloadedError    the queue is full; retrying later helps
    |   +-- DeadlineExceededError    (also TimeoutError) the request's own deadline passed
    +-- BackendError                 the model or the library that runs it
    |   +-- ModelNotFoundError       (also FileNotFoundError)
    |   +-- ModelFormatError         the file is corrupt, truncated or of another kind
    |   +-- BackendStepError         a model step failed
    +-- StoreError                   a tier of the pool; never reaches a request
    +-- FormatError                  bytes that are not a valid recyclable unit; a miss, never an answer
        +-- BundleError              a bundle that can't be used
            +-- BundleNotFoundError  (also FileNotFoundError)
            +-- BundleMismatchError  made for another model, layout, namespace, ...
            +-- BundleSignatureError not signed or authenticated as it has to be

Retrying helps only for `EngineOverloadedError` and, with a later deadline, `DeadlineExceededError`.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "BackendError",
    "BackendStepError",
    "BundleError",
    "BundleMismatchError",
    "BundleNotFoundError",
    "BundleSignatureError",
    "ConfigError",
    "DeadlineExceededError",
    "EmptyPromptError",
    "EngineClosedError",
    "EngineOverloadedError",
    "FormatError",
    "InvalidRequestError",
    "InvalidSamplingError",
    "KiteError",
    "MissingExtraError",
    "ModelFormatError",
    "ModelNotFoundError",
    "PromptTooLongError",
    "RequestError",
    "StoreError",
    "UnknownAdapterError",
    "UnsupportedOptionError",
]


class KiteError(Exception):
    """Root of the tree: catch it to catch everything kitelib raises on purpose."""


class RequestError(KiteError):
    """The caller has to change something, or wait."""


class InvalidRequestError(RequestError, ValueError):
    """The arguments of a call make no sense."""


class EmptyPromptError(InvalidRequestError):
    """The prompt holds no token."""


class PromptTooLongError(InvalidRequestError):
    """The prompt does not fit the model's context.

    Attributes:
        num_prompt_tokens: tokens in the prompt.
        max_prompt_tokens: the most tokens a prompt may have here.
    """

    def __init__(self, num_prompt_tokens: int, max_prompt_tokens: int) -> None:
        super().__init__(
            f"the prompt has {num_prompt_tokens} tokens, but at most {max_prompt_tokens} fit the context; "
            "shorten it, or open the engine with a larger n_ctx"
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_prompt_tokens = max_prompt_tokens


class InvalidSamplingError(InvalidRequestError):
    """A sampling value is out of range; the message names the field, the value and the range."""


class UnknownAdapterError(InvalidRequestError):
    """The request names an adapter that the engine was not opened with."""


class ConfigError(RequestError, ValueError):
    """An option or a configuration key is wrong; the message names it and the nearest valid one."""


class UnsupportedOptionError(ConfigError):
    """The option exists, but this backend or this model does not have it."""


class MissingExtraError(RequestError, ImportError):
    """An optional dependency is missing.

    Attributes:
        extra: the extra to install, as in ``pip install 'kitelib[extra]'``.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}; install it with: pip install 'kitelib[{extra}]'")
        self.extra = extra


class EngineClosedError(RequestError):
    """The engine was closed before or during the call."""

    def __init__(self, message: str = "the engine is closed; open a new one") -> None:
        super().__init__(message)


class EngineOverloadedError(RequestError):
    """The waiting queue is full. Retry later, or open the engine with a larger max_queue."""


class DeadlineExceededError(RequestError, TimeoutError):
    """The request's deadline passed before it finished."""


class BackendError(KiteError):
    """The model, or the library that runs it, is at fault."""


class ModelNotFoundError(BackendError, FileNotFoundError):
    """No model file or folder at the given path."""


class ModelFormatError(BackendError):
    """The model file is corrupt, truncated, or not of the expected kind."""


class BackendStepError(BackendError):
    """A model step failed; the requests in that step are failed, the engine goes on."""


class StoreError(KiteError):
    """A tier of the pool failed. Inside the engine this is a miss and a metric, never an exception."""


class FormatError(KiteError):
    """Bytes that are not a valid recyclable unit: wrong magic, size, version or checksum."""


class BundleError(FormatError):
    """A bundle of recyclable units that can't be used; the message names the file and what is wrong with it."""


class BundleNotFoundError(BundleError, FileNotFoundError):
    """No bundle at the given path."""


class BundleMismatchError(BundleError):
    """The bundle was made for something else than what the engine runs.

    Attributes:
        differences: name of each field that differs -> what the bundle has and what the engine has, as text.
    """

    def __init__(self, message: str, differences: Mapping[str, tuple[str, str]]) -> None:
        super().__init__(message)
        self.differences = dict(differences)


class BundleSignatureError(BundleError):
    """The bundle is not signed, not by a trusted key, or was changed after it was signed."""
