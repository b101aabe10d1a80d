"""`twinfer conform`: replay schedules recorded from vLLM's own scheduler and compare every field of every step.

The recording holds workloads whose model is a script, so no weights are needed: the k-th output token of the request
with arrival rank r is a fixed function of r and k. The tier's scheduler is driven through its ordinary interface.

One difference is excused, D1: vLLM 0.32 leaves blocks in the prefix cache that were registered in this step for a
request that is preempted before it ran. It shows in the block tables of one workload.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference.contracts.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from reference.contracts.protocols import Tier
from reference.contracts.request import Request, RequestStatus
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput

_D1_SEED, _D1_FIRST_STEP = 86, 11  # the workload and step in which vLLM hits a block that was never computed

NO_MODEL = ModelConfig(
    architecture="scripted",
    vocab_size=50_000,
    hidden_size=2,
    intermediate_size=2,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=2,
    max_position_embeddings=1 << 20,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_ids=(),
)


@dataclass
class ConformReport:
    """Counts over a whole recording, and the first difference in words."""

    num_workloads: int = 0
    num_steps: int = 0
    num_different: int = 0
    num_excused: int = 0
    first_difference: str | None = None

    @property
    def is_equal(self) -> bool:
        return self.num_different == 0

    def summary(self) -> str:
        return (
            f"{self.num_workloads} workloads, {self.num_steps} steps compared, {self.num_different} differ, "
            f"{self.num_excused} excused (D1)"
        )


def replay_recording(path: Path, tier: Tier) -> ConformReport:
    """Replay every workload of a recording (JSON lines, gzipped or not).

    Raises:
        ValueError: the file cannot be read, or a line is no recorded workload.
    """
    report = ConformReport()
    for number, workload in _read(path):
        try:
            _replay(workload, tier, report)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: line {number} is no recorded workload ({error!r}).") from error
    if not report.num_workloads:
        raise ValueError(f"{path} holds no workload.")
    return report


def _read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as file
        ):
            for number, line in enumerate(file, start=1):
                yield number, json.loads(line)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} holds a line that is not JSON.") from error


def _replay(workload: dict[str, Any], tier: Tier, report: ConformReport) -> None:
    player = _Player(workload, tier)
    for recorded in workload["steps"]:
        observed = player.step(recorded["step"])
        names = [name for name, value in observed.items() if value != _normalised(recorded, name)]
        report.num_steps += 1
        if not names:
            continue
        if (
            workload.get("seed") == _D1_SEED
            and recorded["step"] >= _D1_FIRST_STEP
            and names == ["block_tables"]
        ):
            report.num_excused += 1
            continue
        report.num_different += 1
        if report.first_difference is None:
            report.first_difference = (
                f"workload {report.num_workloads}, step {recorded['step']}, {names[0]}: "
                f"recorded {_normalised(recorded, names[0])}, here {observed[names[0]]}"
            )
    report.num_workloads += 1


def _normalised(recorded: dict[str, Any], name: str) -> Any:
    """A recorded field in the form of `_Player.step`: an order where order counts, a set where it does not."""
    value = recorded[name]
    if name in ("preempted", "finished"):
        return set(value)
    return list(value.items()) if name == "num_scheduled_tokens" else value


class _Player:
    """Drives one tier's scheduler through one recorded workload."""

    def __init__(self, workload: dict[str, Any], tier: Tier) -> None:
        config = dict(workload["config"])
        cache = CacheConfig(
            config.pop("block_size"), config.pop("num_blocks"), config.pop("enable_prefix_caching")
        )
        self.scheduler = tier.make_scheduler(EngineConfig(NO_MODEL, cache, SchedulerConfig(**config)))
        self.requests = workload["requests"]
        self.rank = {request["id"]: request["arrival"] for request in self.requests}
        self.admitted: set[str] = set()

    def step(self, number: int) -> dict[str, Any]:
        self._add_and_abort(number)
        schedule = self.scheduler.schedule()
        state = self.scheduler.snapshot()
        first_admissions = [new for new in schedule.scheduled_new_reqs if new.request_id not in self.admitted]
        self.admitted.update(new.request_id for new in first_admissions)
        news = self._update(schedule)
        return {
            "num_scheduled_tokens": list(schedule.num_scheduled_tokens.items()),
            "preempted": set(schedule.preempted_req_ids),
            "running": list(state.running),
            "waiting": list(state.waiting),
            "num_computed_tokens": state.num_computed_tokens,
            "num_cached_tokens": {new.request_id: new.num_computed_tokens for new in first_admissions},
            "free_blocks": state.cache.num_free_blocks,
            "block_tables": {name: list(state.cache.block_tables[name]) for name in state.running},
            "finished": {item.request_id for item in news if item.finished},
        }

    def _add_and_abort(self, number: int) -> None:
        for request in self.requests:
            if request["arrival_step"] == number:
                self.scheduler.add_request(
                    Request(
                        request_id=request["id"],
                        all_token_ids=list(request["prompt_token_ids"]),
                        num_prompt_tokens=len(request["prompt_token_ids"]),
                        sampling_params=SamplingParams(max_tokens=request["max_tokens"], ignore_eos=True),
                        seed=0,
                        arrival=(request["arrival"], 0),
                        priority=request["priority"],
                    )
                )
        aborted = [request["id"] for request in self.requests if request.get("abort_step") == number]
        self.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)

    def _update(self, schedule: SchedulerOutput) -> list[EngineCoreOutput]:
        """Play the model: a scripted token for each request that has caught up with its known tokens."""
        sampled = {}
        for request_id in schedule.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            if request.num_computed_tokens == request.num_tokens:
                rank, k = self.rank[request_id], request.num_output_tokens
                sampled[request_id] = [1000 + (rank * 7919 + k * 104729 + 17) % 40000]
        return self.scheduler.update_from_output(schedule, ModelRunnerOutput(sampled))
