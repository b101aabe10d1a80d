"""The factories by which the front end finds this implementation (entry point `twinfer.tiers`)."""

from __future__ import annotations

from reference.contracts.config import EngineConfig
from reference.contracts.protocols import Checkpoint, KVCacheManager, ModelRunner, Scheduler


class Tier:
    """Imports are inside the factories: scheduling alone needs no NumPy."""

    name = "reference"

    def why_unavailable(self) -> str | None:
        return None

    def default_device(self) -> str:
        return "cpu"

    def kv_cache_memory(self, config: EngineConfig, checkpoint: Checkpoint, utilization: float) -> int | None:
        return None

    def make_kv_cache_manager(self, config: EngineConfig) -> KVCacheManager:
        from reference.kv_cache_manager import KVCacheManager

        return KVCacheManager(config.cache)

    def make_scheduler(self, config: EngineConfig) -> Scheduler:
        from reference.scheduler import Scheduler

        return Scheduler(config, self.make_kv_cache_manager(config))

    def make_model_runner(
        self, config: EngineConfig, checkpoint: Checkpoint, draft_checkpoint: Checkpoint | None = None
    ) -> ModelRunner:
        from reference.model_runner import ModelRunner
        from reference.speculator import make_speculator

        return ModelRunner(config, checkpoint, make_speculator(config, draft_checkpoint))


TIER = Tier()
