"""The factories by which the front end finds this implementation (entry point `twinfer.tiers`)."""

from __future__ import annotations

from importlib.util import find_spec

from reference.contracts.config import EngineConfig
from reference.contracts.protocols import Checkpoint, KVCacheManager, ModelRunner, Scheduler


class Tier:
    """Imports are inside the factories: scheduling alone needs neither torch nor the extension."""

    name = "fast"

    def why_unavailable(self) -> str | None:
        if find_spec("torch") is None:
            return "The fast tier needs torch: run `make`, or `pip install torch`, or use the reference tier."
        if find_spec("fast._cpu") is None:
            return "The extension of the fast tier is not built: run `make setup`, or use the reference tier."
        return None

    def default_device(self) -> str:
        """A GPU where one can be used. Without kernels for one, torch is not even asked."""
        if find_spec("fast._cuda") is None:
            return "cpu"
        from fast import kernels

        return "cpu" if kernels.why_no_gpu() else "cuda"

    def kv_cache_memory(self, config: EngineConfig, checkpoint: Checkpoint, utilization: float) -> int | None:
        if config.device != "cuda":
            return None
        from fast.device_memory import kv_cache_memory

        return kv_cache_memory(config, checkpoint, utilization)

    def make_kv_cache_manager(self, config: EngineConfig) -> KVCacheManager:
        from fast.kv_cache_manager import KVCacheManager

        return KVCacheManager(config.cache)

    def make_scheduler(self, config: EngineConfig) -> Scheduler:
        from fast.scheduler import Scheduler

        return Scheduler(config, self.make_kv_cache_manager(config))

    def make_model_runner(
        self, config: EngineConfig, checkpoint: Checkpoint, draft_checkpoint: Checkpoint | None = None
    ) -> ModelRunner:
        from fast.model_runner import ModelRunner
        from fast.speculator import make_speculator

        return ModelRunner(config, checkpoint, make_speculator(config, draft_checkpoint))


TIER = Tier()
