"""`compare_tiers`: equal tiers are found equal, and a planted difference is found where it was planted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference.contracts.config import EngineConfig
from reference.contracts.protocols import Checkpoint, KVCacheManager, ModelRunner, Scheduler, Tier
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from reference.frontend.diff import compare_tiers
from reference.frontend.report import print_diff
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest
from tests.tiny_models import make_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("model")))


def make_workload(**params: Any) -> Workload:
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, **params)
    requests = tuple(
        WorkloadRequest(f"r{i}", prompt_token_ids=tuple(range(10, 40 + i)), arrival_step=i, params=sampling)
        for i in range(4)
    )
    return Workload(requests, {"block_size": 4, "num_blocks": 20})


class PlantedTier:
    """The reference tier with something changed in what its runner or scheduler hands out."""

    name = "planted"

    def __init__(self, change_output: Any = None, change_scheduler: Any = None) -> None:
        self.base = load_tier("reference")
        self.change_output = change_output
        self.change_scheduler = change_scheduler

    def why_unavailable(self) -> str | None:
        return None

    def default_device(self) -> str:
        return "cpu"

    def make_kv_cache_manager(self, config: EngineConfig) -> KVCacheManager:
        return self.base.make_kv_cache_manager(config)

    def make_scheduler(self, config: EngineConfig) -> Scheduler:
        scheduler = self.base.make_scheduler(config)
        if self.change_scheduler is not None:
            self.change_scheduler(scheduler)
        return scheduler

    def make_model_runner(self, config: EngineConfig, checkpoint: Checkpoint) -> ModelRunner:
        runner = self.base.make_model_runner(config, checkpoint)
        execute = runner.execute

        def changed(schedule: SchedulerOutput) -> ModelRunnerOutput:
            output = execute(schedule)
            if self.change_output is not None:
                self.change_output(schedule, output)
            return output

        runner.execute = changed  # type: ignore[method-assign]
        return runner


def reference() -> Tier:
    return load_tier("reference")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reference_and_fast_are_equal_through_preemptions_and_cache_hits(
    model: str, temperature: float
) -> None:
    report = compare_tiers((reference(), load_tier("fast")), model, make_workload(temperature=temperature))
    assert report.is_equal
    assert report.excused == []
    assert report.num_finished == 4
    assert report.num_tokens == 48
    assert report.num_preemptions > 0
    assert report.num_cached_tokens > 0


def plant_token(step: int, request_id: str, gap: float) -> Any:
    """From `step` on the request's token is another one, and its logits differ by `gap`."""

    def change(schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
        if schedule.step == step and request_id in output.sampled_token_ids:
            assert output.logits is not None
            (token,) = output.sampled_token_ids[request_id]
            output.sampled_token_ids[request_id] = [token + 1 if token < 300 else token - 1]
            output.logits[request_id] = output.logits[request_id] + np.float32(gap)

    return change


def test_a_wrong_token_is_found_with_its_request_step_gap_and_block_table(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    planted: Any = PlantedTier(change_output=plant_token(5, "r2", 0.5))
    report = compare_tiers((reference(), planted), model, make_workload(temperature=0))
    found = report.divergence
    assert found is not None
    assert (found.what, found.request_id, found.step) == ("token", "r2", 5)
    assert found.decision is not None
    assert found.decision.logit_gap == pytest.approx(0.5, abs=1e-4)
    assert len(found.block_tables[0]) > 0
    print_diff(report)
    printed = capsys.readouterr().out
    for text in (
        "first difference",
        "step          5",
        "request       r2",
        "logit gap     0.5",
        "block table [",
    ):
        assert text in printed
    assert "reference and planted differ." in printed


def test_a_wrong_token_at_a_clear_decision_is_not_excused_however_close_the_logits(model: str) -> None:
    planted: Any = PlantedTier(change_output=plant_token(5, "r2", 0.0))
    report = compare_tiers((reference(), planted), model, make_workload(temperature=0))
    assert report.divergence is not None
    assert report.excused == []


def tie(logits: np.ndarray) -> np.ndarray:
    """The row with its two best logits made equal: a decision that rounding alone may turn."""
    tied = logits.copy()
    best = np.argsort(-tied)[:2]
    tied[best] = tied[best].max()
    return tied


def test_a_tie_is_excused_and_the_other_requests_are_compared_to_the_end(model: str) -> None:
    def tied_run(flip: bool) -> Any:
        def change(schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
            if schedule.step == 5 and "r2" in output.sampled_token_ids:
                assert output.logits is not None
                output.logits["r2"] = tie(output.logits["r2"])
                best, second = np.argsort(-output.logits["r2"], kind="stable")[:2]
                output.sampled_token_ids["r2"] = [int(second if flip else best)]

        return PlantedTier(change_output=change)

    report = compare_tiers((tied_run(False), tied_run(True)), model, make_workload(temperature=0))
    assert report.is_equal
    assert [found.request_id for found in report.excused] == ["r2"]
    assert report.num_tokens > 36  # all tokens of the other three


def test_after_an_excuse_a_wrong_token_of_another_request_is_still_found(model: str) -> None:
    def run(flip: bool) -> Any:
        def change(schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
            if schedule.step == 5 and "r2" in output.sampled_token_ids:
                assert output.logits is not None
                output.logits["r2"] = tie(output.logits["r2"])
                best, second = np.argsort(-output.logits["r2"], kind="stable")[:2]
                output.sampled_token_ids["r2"] = [int(second if flip else best)]
            if flip and schedule.step == 8 and "r0" in output.sampled_token_ids:
                output.sampled_token_ids["r0"] = [(output.sampled_token_ids["r0"][0] + 1) % 300]

        return PlantedTier(change_output=change)

    report = compare_tiers((run(False), run(True)), model, make_workload(temperature=0))
    assert len(report.excused) == 1
    assert report.divergence is not None
    assert report.divergence.request_id == "r0"


def test_another_order_of_the_free_queue_is_found_before_any_token_differs(model: str) -> None:
    def reverse_frees(scheduler: Scheduler) -> None:
        pool = scheduler.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        free = pool.free_blocks
        pool.free_blocks = lambda blocks: free(blocks[::-1])

    planted: Any = PlantedTier(change_scheduler=reverse_frees)
    report = compare_tiers((reference(), planted), model, make_workload(temperature=0))
    assert report.divergence is not None
    assert report.divergence.what in ("free_order", "block_tables")  # the latter if the step also allocates
