"""Both tiers make the decisions of vLLM's own v1 scheduler, in all 150 recorded workloads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from reference.contracts.config import EngineConfig
from reference.contracts.protocols import Checkpoint, KVCacheManager, Scheduler, Tier
from reference.frontend.conform import replay_recording

RECORDING = Path(__file__).parent / "vllm-schedules.jsonl.gz"


def test_every_step_of_the_recording_is_reproduced_but_for_d1(tier: Tier) -> None:
    report = replay_recording(RECORDING, tier)
    assert report.first_difference is None
    assert report.summary() == "150 workloads, 23676 steps compared, 0 differ, 96 excused (D1)"


def test_the_recording_takes_the_paths_that_matter() -> None:
    with gzip.open(RECORDING, "rt") as file:
        workloads = [json.loads(line) for line in file]
    with_preemption = [w for w in workloads if any(step["preempted"] for step in w["steps"])]
    with_hits = [w for w in workloads if any(any(step["num_cached_tokens"].values()) for step in w["steps"])]
    with_abort = [w for w in workloads if any("abort_step" in request for request in w["requests"])]
    assert len(with_preemption) == 66
    assert len(with_hits) > 30
    assert len(with_abort) > 10


class _StingyTier:
    """A tier that admits nobody in the first step: any recording must notice."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name = tier.name

    def why_unavailable(self) -> str | None:
        return None

    def default_device(self) -> str:
        return self.tier.default_device()

    def kv_cache_memory(self, config: EngineConfig, checkpoint: Checkpoint, utilization: float) -> None:
        return None

    def make_kv_cache_manager(self, config: EngineConfig) -> KVCacheManager:
        return self.tier.make_kv_cache_manager(config)

    def make_scheduler(self, config: EngineConfig) -> Scheduler:
        scheduler = self.tier.make_scheduler(config)
        manager = scheduler.kv_cache_manager
        allocate, calls = manager.allocate_slots, []

        def refuse_the_first(*args: object) -> list[int] | None:
            calls.append(args)
            return None if len(calls) == 1 else allocate(*args)  # type: ignore[arg-type]

        manager.allocate_slots = refuse_the_first  # type: ignore[assignment, method-assign]
        return scheduler


def test_a_scheduler_that_decides_otherwise_is_noticed_with_workload_step_and_field(tier: Tier) -> None:
    report = replay_recording(RECORDING, _StingyTier(tier))  # type: ignore[arg-type]
    assert report.num_different > 0
    assert report.first_difference is not None
    assert report.first_difference.startswith(
        "workload 0, step 0, num_scheduled_tokens: recorded [('r0', 32)], here []"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json\n", "not JSON"),
        (b'{"steps": []}\n', "line 1 is no recorded workload"),
        (b"", "holds no workload"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_in_one_sentence(
    tmp_path: Path, tier: Tier, content: bytes, message: str
) -> None:
    file = tmp_path / "recording.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        replay_recording(file, tier)


def test_a_truncated_recording_is_refused_in_one_sentence(tmp_path: Path, tier: Tier) -> None:
    file = tmp_path / "recording.jsonl.gz"
    file.write_bytes(RECORDING.read_bytes()[:5000])
    with pytest.raises(ValueError, match="cannot be read"):
        replay_recording(file, tier)
