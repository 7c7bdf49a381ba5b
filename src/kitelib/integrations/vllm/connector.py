"""`KiteConnector`: vLLM's interface, handed on to the half that this process has."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from kitelib.errors import UnsupportedOptionError
from kitelib.integrations.vllm.compat import check_config, check_interface
from kitelib.integrations.vllm.host import PoolHost, acquire, release
from kitelib.integrations.vllm.identity import model_state_of
from kitelib.integrations.vllm.layout import Rank, read_layout
from kitelib.integrations.vllm.messages import LayoutMessage, StepMessage
from kitelib.integrations.vllm.metrics import Counters, KitePromMetrics, KiteStats
from kitelib.integrations.vllm.scheduler_side import SchedulerSide
from kitelib.integrations.vllm.settings import read_settings
from kitelib.integrations.vllm.worker_side import WorkerSide

__all__ = ["KiteConnector"]

_LOG = logging.getLogger("kitelib.vllm")


class KiteConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Loads and keeps vLLM's KV cache through KITE's pool.

    vLLM makes one beside its scheduler and one beside each worker. Methods are those of vLLM's interface; what they do
    is said there.

    Raises:
        ConfigError, UnsupportedOptionError: vLLM or the pool is configured in a way that can't work; says how to.
        MissingExtraError: a tier's package is not installed.
        ModelNotFoundError, ModelFormatError, BackendError: the model's files can't be read.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = read_settings(transfer.kv_connector_extra_config or {})
        check_interface(KVConnectorBase_V1, allow_untested=settings.allow_untested_version)
        check_config(vllm_config)
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        self._layout: LayoutMessage | None = None
        self._groups = kv_cache_config
        pool = settings.to_pool_config()
        parallel = vllm_config.parallel_config
        is_worker = role == KVConnectorRole.WORKER
        self._key = json.dumps([transfer.engine_id, getattr(parallel, "data_parallel_rank", 0)])
        share = parallel.world_size if is_worker else 1
        model_state = b"" if is_worker else model_state_of(vllm_config)
        self._host: PoolHost | None = acquire(self._key, pool, worker=is_worker, share=share)
        if not is_worker:
            self._scheduler = SchedulerSide(
                self._host,
                model_state=model_state,
                rank=Rank(0, parallel.tensor_parallel_size, 0, parallel.pipeline_parallel_size),
                block_tokens=_block_tokens(vllm_config, kv_cache_config),
                secret=pool.namespace_secret,
                patience_s=settings.patience_seconds,
            )

    # Properties of the kind of connector

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not kept is computed again."""
        return False

    @property
    def host(self) -> PoolHost:
        """The pool of this process; for tests and tools."""
        assert self._host is not None
        return self._host

    # Beside a worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Takes the engine's KV cache; raises UnsupportedOptionError for a layout that nobody knows."""
        if self._groups is None:
            raise UnsupportedOptionError("this vLLM does not tell how its KV cache is made up; install a newer one")
        rank = _rank(self._vllm_config)
        layout = read_layout(self._vllm_config, self._groups, kv_caches, rank)
        self._layout = LayoutMessage(layout.id, layout.block_bytes)
        self._worker = WorkerSide(self.host, layout, rank)
        _LOG.info("KITE keeps blocks of %d tokens, %d bytes, as %s", layout.block_tokens, layout.block_bytes, layout.id)

    def get_handshake_metadata(self) -> LayoutMessage | None:
        """What the scheduler has to know of this worker."""
        return self._layout

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's interface
        """Starts this step's loads."""
        if self._worker is not None and (message := self._message()) is not None:
            self._worker.begin(message)
            self._worker.start_loads(message)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no step computes on blocks that are still on their way."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole blocks are kept at the end of the step."""

    def wait_for_save(self) -> None:
        """Copies the blocks that the step completed."""
        if self._worker is not None and (message := self._message()) is not None:
            self._worker.save(message)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Requests whose loads have ended."""
        if self._worker is None:
            return None, None
        return None, self._worker.finished(self._message()) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were promised and did not come."""
        return self._worker.take_failed() if self._worker is not None else set()

    def _message(self) -> StepMessage | None:
        message = self._connector_metadata
        return message if isinstance(message, StepMessage) else None

    # Beside the scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Takes the layout of the first worker."""
        self._take_layout(metadata.get(0))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """As `set_xfer_handshake_metadata`, from all stages of a pipeline."""
        self._take_layout(metadata.get((0, 0)))

    def _take_layout(self, layout: Any) -> None:
        if self._scheduler is not None and isinstance(layout, LayoutMessage):
            self._scheduler.use_layout(layout)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much of a prompt is worth loading."""
        assert self._scheduler is not None
        count = self._scheduler.matched(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plans the load of what was promised."""
        assert self._scheduler is not None
        self._scheduler.track(request)
        if num_external_tokens:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMessage:
        """This step's loads and saves."""
        assert self._scheduler is not None
        return self._scheduler.message(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ARG002
        """A step has ended."""
        if self._scheduler is not None:
            self._scheduler.ended()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """Its blocks may be freed at once: what is kept of them was copied."""
        if self._scheduler is not None:
            self._scheduler.forget(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Makes everything in the pool void, for this model and all processes."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def take_events(self) -> Iterable[Any]:
        """None."""
        return ()

    # Both

    def get_kv_connector_stats(self) -> KiteStats | None:
        """What happened since the last call."""
        values = self._counters().take()
        return KiteStats(data=values) if values else None

    def _counters(self) -> Counters:
        return self.host.counters

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KiteStats:
        """The stats that a worker sent."""
        return KiteStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KitePromMetrics:
        """The ``vllm:kite_...`` metrics."""
        return KitePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Writes what is on its way and closes the pool, if no other half in this process uses it."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._host is not None:
            self._host = None
            release(self._key)


def _rank(vllm_config: Any) -> Rank:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    parallel = vllm_config.parallel_config
    return Rank(
        get_tp_group().rank_in_group,
        parallel.tensor_parallel_size,
        get_pp_group().rank_in_group,
        parallel.pipeline_parallel_size,
    )


def _block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    size = groups[0].kv_cache_spec.block_size if groups else vllm_config.cache_config.block_size
    return int(size)
