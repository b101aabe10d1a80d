"""`compare_tiers`: equal tiers are found equal, and a planted difference is found where it was planted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.contracts.config import EngineConfig
from reference.contracts.logits import unpack_bitmask
from reference.contracts.protocols import Checkpoint, KVCacheManager, ModelRunner, Scheduler, Tier
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from reference.contracts.structured_outputs import StructuredOutputsParams
from reference.contracts.trace import CacheSnapshot
from reference.frontend import cli
from reference.frontend.diff import compare_tiers
from reference.frontend.report import excerpts, print_diff
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest, write_workload
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

    def kv_cache_memory(self, config: EngineConfig, checkpoint: Checkpoint, utilization: float) -> None:
        return None

    def make_kv_cache_manager(self, config: EngineConfig) -> KVCacheManager:
        return self.base.make_kv_cache_manager(config)

    def make_scheduler(self, config: EngineConfig) -> Scheduler:
        scheduler = self.base.make_scheduler(config)
        if self.change_scheduler is not None:
            self.change_scheduler(scheduler)
        return scheduler

    def make_model_runner(
        self, config: EngineConfig, checkpoint: Checkpoint, draft_checkpoint: Checkpoint | None = None
    ) -> ModelRunner:
        runner = self.base.make_model_runner(config, checkpoint, draft_checkpoint)
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
    assert (found.what, found.request_id, found.step) == ("token 3", "r2", 5)
    assert found.decision is not None
    assert found.decision.logit_gap == pytest.approx(0.5, abs=1e-4)
    assert len(found.block_tables[0]) == 9  # 32 prompt tokens and 3 of the output in blocks of 4
    assert found.block_tables[0] == found.block_tables[1]
    print_diff(report)
    printed = capsys.readouterr().out
    rows = {line[2:24].strip(): line[25:] for line in printed.splitlines()[1:10]}
    assert rows["step"] == "5"
    assert rows["request"] == "r2"
    assert (rows["reference"], rows["planted"]) == tuple(map(str, found.values))
    assert rows["block table, planted"] == " ".join(map(str, found.block_tables[1]))
    assert rows["logit gap"] == "0.5"
    assert "First difference:" in printed
    assert "reference and planted differ." in printed


def test_the_program_exits_with_1_on_a_difference(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = PlantedTier(change_output=plant_token(5, "r2", 0.5))
    monkeypatch.setattr(cli, "load_tier", lambda name: planted if name == "fast" else reference())
    write_workload(make_workload(temperature=0), tmp_path / "w.jsonl")
    assert cli.main(["diff", str(tmp_path / "w.jsonl"), "--model", model]) == 1
    assert "First difference:" in capsys.readouterr().out


def test_a_token_that_ends_its_request_is_shown_with_the_blocks_it_had(model: str) -> None:
    planted: Any = PlantedTier(change_output=plant_token(11, "r0", 0.5))
    found = compare_tiers((reference(), planted), model, make_workload(temperature=0)).divergence
    assert found is not None
    assert (found.what, found.request_id) == ("token 11", "r0")
    assert len(found.block_tables[0]) == 11


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
                output.logits["r2"] = tie(output.logits["r2"][0])[None]
                best, second = np.argsort(-output.logits["r2"][0], kind="stable")[:2]
                output.sampled_token_ids["r2"] = [int(second if flip else best)]

        return PlantedTier(change_output=change)

    report = compare_tiers((tied_run(False), tied_run(True)), model, make_workload(temperature=0))
    assert report.is_equal
    assert [found.request_id for found in report.excused] == ["r2"]
    assert report.num_tokens > 36  # all tokens of the other three


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_decision_under_a_grammar_is_one_between_the_tokens_it_allows(model: str, is_tied: bool) -> None:
    """ "0" and "9" are equal or not; that a forbidden token lies far above, or level with the best, does not count."""

    def run(flip: bool) -> Any:
        def change(schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
            if schedule.step == 2 and "r2" in output.sampled_token_ids:
                assert output.logits is not None
                row = output.logits["r2"] = output.logits["r2"].copy()  # [1, V]
                allowed = np.flatnonzero(unpack_bitmask(schedule.grammar_bitmasks["r2"][0], row.shape[1]))
                first, last = int(allowed[0]), int(allowed[-1])
                row[0, allowed] = 0.0
                row[0, [first, last]] = 5.0, 5.0 if is_tied else 4.0
                row[0, 200] = 9.0 if is_tied else 5.0
                output.sampled_token_ids["r2"] = [last if flip else first]

        return PlantedTier(change_output=change)

    workload = make_workload(temperature=0, structured_outputs=StructuredOutputsParams(regex="[0-9]+"))
    report = compare_tiers((run(False), run(True)), model, workload)
    assert report.is_equal == is_tied
    decision = (report.excused[0] if is_tied else report.divergence).decision  # type: ignore[union-attr]
    assert decision is not None
    assert decision.margin == pytest.approx(0.0 if is_tied else 1.0)


def test_after_an_excuse_a_wrong_token_of_another_request_is_still_found(model: str) -> None:
    def run(flip: bool) -> Any:
        def change(schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
            if schedule.step == 5 and "r2" in output.sampled_token_ids:
                assert output.logits is not None
                output.logits["r2"] = tie(output.logits["r2"][0])[None]
                best, second = np.argsort(-output.logits["r2"][0], kind="stable")[:2]
                output.sampled_token_ids["r2"] = [int(second if flip else best)]
            if flip and schedule.step == 8 and "r0" in output.sampled_token_ids:
                output.sampled_token_ids["r0"] = [(output.sampled_token_ids["r0"][0] + 1) % 300]

        return PlantedTier(change_output=change)

    report = compare_tiers((run(False), run(True)), model, make_workload(temperature=0))
    assert len(report.excused) == 1
    assert report.divergence is not None
    assert report.divergence.request_id == "r0"


def test_after_an_excuse_an_abort_may_strike_at_another_token_but_another_end_is_a_difference(
    model: str,
) -> None:
    """With another schedule the aborted request may have got one token less, as it does in the second run."""

    def run(flip: bool, lose_the_last_token: bool = False) -> Any:
        def change(schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
            if schedule.step == 5 and "r2" in output.sampled_token_ids:
                assert output.logits is not None
                output.logits["r2"] = tie(output.logits["r2"][0])[None]
                best, second = np.argsort(-output.logits["r2"][0], kind="stable")[:2]
                output.sampled_token_ids["r2"] = [int(second if flip else best)]
            if flip and schedule.step == 8:  # the last before the abort
                output.sampled_token_ids.pop("r1")
            if lose_the_last_token and schedule.step == 11:
                output.sampled_token_ids.pop("r0")
                output.errors["r0"] = "lost"

        return PlantedTier(change_output=change)

    requests = [*make_workload(temperature=0).requests]
    requests[1] = replace(requests[1], abort_step=9)
    workload = Workload(tuple(requests), {"block_size": 4, "num_blocks": 60})
    assert compare_tiers((run(False), run(True)), model, workload).is_equal
    found = compare_tiers((run(False), run(True, lose_the_last_token=True)), model, workload).divergence
    assert found is not None
    assert (found.request_id, found.what.split()[0]) == ("r0", "end")


def test_another_order_of_the_free_queue_is_found_before_any_token_differs(model: str) -> None:
    def reverse_frees(scheduler: Scheduler) -> None:
        pool = scheduler.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        free = pool.free_blocks
        pool.free_blocks = lambda blocks: free(blocks[::-1])

    planted: Any = PlantedTier(change_scheduler=reverse_frees)
    report = compare_tiers((reference(), planted), model, make_workload(temperature=0))
    assert report.divergence is not None
    assert report.divergence.what in ("free_order", "block_tables")  # the latter if the step also allocates


def test_another_block_in_one_table_is_found_with_its_request(model: str) -> None:
    def swap_in_snapshot(scheduler: Scheduler) -> None:
        manager = scheduler.kv_cache_manager
        snapshot = manager.snapshot

        def changed() -> CacheSnapshot:
            seen = snapshot()
            tables = {name: (*t[:-1], 19) if name == "r1" else t for name, t in seen.block_tables.items()}
            return replace(seen, block_tables=tables)

        manager.snapshot = changed  # type: ignore[method-assign]

    planted: Any = PlantedTier(change_scheduler=swap_in_snapshot)
    report = compare_tiers((reference(), planted), model, make_workload(temperature=0))
    assert report.divergence is not None
    assert (report.divergence.what, report.divergence.request_id) == ("block_tables", "r1")
    assert report.divergence.step == 1
    assert report.divergence.values[1][-1] == 19


def test_a_step_number_is_that_of_the_workload_also_after_idle_steps(model: str) -> None:
    late = WorkloadRequest(
        "late", prompt_token_ids=(5, 6), arrival_step=1000, params=SamplingParams(temperature=0)
    )
    planted: Any = PlantedTier(change_output=plant_token(2, "late", 0.5))
    found = compare_tiers((reference(), planted), model, Workload((late,))).divergence
    assert found is not None
    assert (found.what, found.step) == ("token 2", 1002)


def test_an_aborted_request_is_compared_by_its_end_until_a_token_is_excused(model: str) -> None:
    requests = [*make_workload(temperature=0).requests]
    requests[1] = replace(requests[1], abort_step=6)
    workload = Workload(tuple(requests), {"block_size": 4, "num_blocks": 40})
    report = compare_tiers((reference(), load_tier("fast")), model, workload)
    assert report.is_equal
    assert report.num_tokens == 3 * 12 + 5
    assert report.num_finished == 4


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((1, 2), (1, 3), ("(1, 2)", "(1, 3)")),
        (7, None, ("7", "None")),
        (
            tuple(range(100)),
            (*range(50), 0, *range(51, 100)),
            (
                "[... 46, 47, 48, 49, 50, 51, 52, 53, 54 ...] (entries 46 to 54 of 100)",
                "[... 46, 47, 48, 49, 0, 51, 52, 53, 54 ...] (entries 46 to 54 of 100)",
            ),
        ),
        (
            tuple(range(30)),
            tuple(range(28)),
            (
                "[... 24, 25, 26, 27, 28, 29] (entries 24 to 29 of 30)",
                "[... 24, 25, 26, 27] (entries 24 to 27 of 28)",
            ),
        ),
    ],
)
def test_long_values_are_shown_around_the_first_difference(
    first: object, second: object, expected: tuple[str, str]
) -> None:
    assert excerpts(first, second) == expected


NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def repeated_workload() -> Workload:
    """Sampled from few tokens, so that the sequence repeats itself and drafts are accepted."""
    workload = make_workload(temperature=1.0)
    requests = tuple(
        replace(r, params=replace(r.params, allowed_token_ids=[40, 41, 42])) for r in workload.requests
    )
    return replace(workload, requests=requests)


def test_several_tokens_a_step_are_compared_one_by_one(model: str) -> None:
    report = compare_tiers((reference(), load_tier("fast")), model, repeated_workload(), speculative=NGRAMS)
    plain = compare_tiers((reference(), load_tier("fast")), model, repeated_workload())
    assert report.is_equal
    assert report.excused == []
    assert report.num_steps < plain.num_steps
    assert report.num_tokens >= plain.num_tokens == 48


def test_a_wrong_token_behind_an_accepted_draft_is_found_at_its_position(model: str) -> None:
    """The last token of the first run of several becomes another one, that its row of logits does not support."""
    planted: list[tuple[str, int, int]] = []  # request, output position, true token
    num_output: dict[str, int] = {}

    def change(_: SchedulerOutput, output: ModelRunnerOutput) -> None:
        for name, token_ids in output.sampled_token_ids.items():
            if len(token_ids) > 1 and not planted:
                planted.append((name, num_output.get(name, 0) + len(token_ids) - 1, token_ids[-1]))
                token_ids[-1] = 43
            num_output[name] = num_output.get(name, 0) + len(token_ids)

    tiers: Any = (reference(), PlantedTier(change_output=change))
    report = compare_tiers(tiers, model, repeated_workload(), speculative=NGRAMS)
    ((name, position, token),) = planted
    assert report.divergence is not None
    assert (report.divergence.request_id, report.divergence.what) == (name, f"token {position}")
    assert report.divergence.values == (token, 43)
    assert position > 0


def test_other_drafts_are_another_schedule(model: str) -> None:
    def change(_: SchedulerOutput, output: ModelRunnerOutput) -> None:
        for drafts in output.draft_token_ids.values():
            drafts[-1] = 43

    tiers: Any = (reference(), PlantedTier(change_output=change))
    report = compare_tiers(tiers, model, repeated_workload(), speculative=NGRAMS)
    assert report.divergence is not None
    assert report.divergence.what == "draft_token_ids"
