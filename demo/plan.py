"""What one run of the demo is asked to do: a value, given to every child process as JSON."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Self

BLOCK_SIZE = 32  # tokens; the CPU attention backend wants a multiple of 32
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 8
MAX_BATCHED_TOKENS = 512
REFERENCE_BLOCKS = 640  # the reference engine's pool: room for every block of every sequence, so nothing is evicted
TOLERANCE = 1e-3  # of the audit: how far a value may be off, as a share of its object's largest
DELAY_MS = "DEMO_STORE_DELAY_MS"  # environment: how long each store operation of a rank waits first
SEGMENT_BYTES = 2 << 30  # the embedded store's memory: room for everything, so nothing is evicted there either


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One run. ``pool_blocks`` is the tiny KV pool of the cold and warm engines."""

    model: str
    tensor_parallel: int = 1
    num_prompts: int = 24
    max_new_tokens: int = 48
    pool_blocks: int = 64
    dtype: str = "float32"
    connector: str | None = None  # "module:Class", another class to test; None: kvledger by its registered name
    store_delay_ms: int = 0
    load_sync: bool = False
    transfer_mode: str | None = None
    cold_only: bool = False
    kill_master: bool = False
    trace_dir: str | None = None  # where the engines record the protocol's events
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)  # further settings of the connector

    def reference_key(self) -> str:
        """What the reference engine's results depend on; nothing of the connector, the store or the tiny pool."""
        facts = [self.model, self.tensor_parallel, self.num_prompts, self.max_new_tokens, self.dtype]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def kv_transfer_config(self, store_address: str) -> dict[str, Any]:
        """What a user writes after ``--kv-transfer-config``, with the demo's own store."""
        extra: dict[str, Any] = {
            "mode": "standalone-store",
            "master_server_address": store_address,
            "save_decode_cache": True,  # not the default; more blocks in motion, more to check
            "load_async": not self.load_sync,
            "trace_dir": self.trace_dir,
            "transfer_mode": self.transfer_mode or "auto",
        }
        config: dict[str, Any] = {"kv_role": "kv_both", "kv_connector_extra_config": extra | self.extra}
        connector = self.connector or ("demo.faults:SlowConnector" if self.store_delay_ms else None)
        if connector is None:
            return config | {"kv_connector": "MooncakeLedgerConnector"}
        module, _, name = connector.partition(":")
        return config | {"kv_connector": name, "kv_connector_module_path": module}

    def environment(self) -> dict[str, str]:
        """The environment of an engine process: one process per engine (ranks apart), loopback only, no model hub."""
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        values = {
            "PYTHONPATH": path,
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            DELAY_MS: str(self.store_delay_ms),
        }
        if self.tensor_parallel > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            values["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, self.cores()))
        return {**os.environ, **values}

    def cores(self) -> list[int]:
        """One core per rank."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < self.tensor_parallel:
            raise ValueError(f"--tp {self.tensor_parallel} needs as many CPU cores, this machine offers {len(cores)}")
        return cores[: self.tensor_parallel]
