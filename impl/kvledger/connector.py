"""vLLM's face: the class that vLLM loads. Delegates to the scheduler side or the rank side; decides nothing."""

import logging
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from kvledger.assembly import Parts, make_rank_side, make_scheduler_side, recompute_failed_loads
from kvledger.config import Settings, load_settings
from kvledger.errors import ProtocolError
from kvledger.groups import plan_groups, stored_layers
from kvledger.metadata import LedgerMetadata, LedgerWorkerMetadata
from kvledger.mooncake.client import check_direct, installed_distribution
from kvledger.mooncake.embedded import EmbeddedStore, ensure_embedded
from kvledger.namespace import build_keys
from kvledger.plugin import share_vllm_logging
from kvledger.scheduler.side import SchedulerSide
from kvledger.worker.rank_side import RankSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class MooncakeLedgerConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps full KV blocks in a Mooncake store, under the protocol of `docs/protocol.md`.

    Raises:
        ConfigError: a setting, model or parallel layout that cannot work, at start, naming field, value and remedy.
        StoreError: the store cannot be reached at start.
    """

    parts: ClassVar[Parts] = Parts()
    """What it is made of; a subclass may have others."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        share_vllm_logging()
        self._scheduler: SchedulerSide | None = None
        self._rank: RankSide | None = None
        self._lease: EmbeddedStore | None = None
        self._plan = plan_groups(vllm_config, kv_cache_config)
        try:
            settings = load_settings(self._kv_transfer_config.kv_connector_extra_config, os.environ)
            self._check_failure_policy(settings)
            settings = self._attach(settings)
            self._direct = settings.resolved_transfer_mode == "direct"
            keys = build_keys(vllm_config, kv_cache_config, self._plan, settings)
            if role is KVConnectorRole.SCHEDULER:
                self._scheduler = make_scheduler_side(
                    self.parts,
                    settings,
                    self._plan,
                    keys,
                    config=self._kv_transfer_config,
                    steps_in_flight=vllm_config.max_concurrent_batches,
                )
            else:
                self._rank = make_rank_side(self.parts, settings, keys, int(get_tensor_model_parallel_rank()))
        except BaseException:
            self.shutdown()
            raise

    # -- construction ------------------------------------------------------

    def _check_failure_policy(self, settings: Settings) -> None:
        """As a child of MultiConnector: core reads the outer configuration, which a worker builds its connectors under.

        The scheduler's process builds them under none, and later than the ranks: what is wrong is refused by then.
        """
        current = get_current_vllm_config_or_none()
        core = None if current is None else current.kv_transfer_config
        if settings.enable_lookup and core is not None and core is not self._kv_transfer_config:
            recompute_failed_loads(self._kv_transfer_config, core)

    def _attach(self, settings: Settings) -> Settings:
        """With no store address: the host's embedded store, started if nobody has yet."""
        if self.role is KVConnectorRole.SCHEDULER:
            for line in settings.describe():
                logger.info("kvledger: %s", line)
        if not settings.embedded_store:
            return settings
        self._lease = ensure_embedded(settings)
        return settings.attached_to(self._lease.master_address)

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler side.

        Raises:
            ProtocolError: this is a rank's connector.
        """
        if self._scheduler is None:
            raise ProtocolError("scheduler-side hook called on a rank's connector, or after shutdown")
        return self._scheduler

    @property
    def rank_side(self) -> RankSide:
        """The rank side.

        Raises:
            ProtocolError: this is the scheduler's connector.
        """
        if self._rank is None:
            raise ProtocolError("rank-side hook called on the scheduler's connector, or after shutdown")
        return self._rank

    # -- what kind of connector this is ------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a lost save is a later miss, so preempted requests keep their tokens in flight."""
        return False

    @property
    def supports_sleep_mode(self) -> bool:
        """Registered memory does not survive sleep mode (asked by vLLM 0.33 on)."""
        return False

    # -- scheduler side ----------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler_side.bind_tables(lambda request_id: kv_cache_manager.get_block_ids(request_id)[0])

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        self.scheduler_side.bind_pool(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler_side.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self.scheduler_side.admitted(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return LedgerMetadata(self.scheduler_side.build_step(scheduler_output))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, LedgerWorkerMetadata):
            self.scheduler_side.apply_reports(meta.reports)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler_side.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler_side.finished(request)
        return False, None

    def has_pending_block_frees(self) -> bool:
        return self.scheduler_side.has_pending_block_frees()

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_open_jobs()

    def reset_cache(self) -> bool | None:
        side = self.scheduler_side
        return side.reset(refused=not side.core_has_forgotten())

    def snapshot(self) -> dict[str, Any]:
        """Figures of the scheduler side; plain values."""
        return self.scheduler_side.snapshot()

    # -- rank side ---------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        try:
            stored = stored_layers(self._plan, kv_caches)
            if self._direct:
                for device_type in {tensor.device.type for tensor in stored.values()}:
                    check_direct(device_type, installed_distribution())
            self.rank_side.register(stored, self._plan.num_blocks)
        except BaseException:
            self.shutdown()
            raise

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, LedgerMetadata):
            self.rank_side.bind(connector_metadata.plan)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self.rank_side.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: synchronous loads have arrived when `start_load_kv` returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole blocks are stored from `wait_for_save` on."""

    def wait_for_save(self) -> None:
        # vLLM calls this from a `finally`, so also while an exception of the forward is on its way up.
        self.rank_side.submit_stores(forward_failed=sys.exc_info()[0] is not None)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.rank_side.collect()
        return None, self.rank_side.take_finished_loads() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.rank_side.take_bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        reports = self.rank_side.take_reports()
        return LedgerWorkerMetadata(reports) if reports else None

    # -- end ---------------------------------------------------------------

    def take_events(self) -> Iterable[Any]:
        return ()

    def shutdown(self) -> None:
        """End threads and clients, bounded; safe on a half-built object and when called twice."""
        if self._rank is not None:
            self._rank.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._lease is not None:
            self._lease.release()
            self._lease = None
