"""The random workloads themselves: a bug is found, made small, written down and replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reference.contracts.noise import gumbel_noise
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.cli import main as twinfer
from reference.frontend.outputs import RequestMetrics, RequestOutput
from reference.frontend.workload import Workload, WorkloadRequest, read_workload
from tests import fuzz
from tests.fuzz import Paths, assert_paths_were_taken, check_seeds
from tests.mutants import MUTANTS
from tests.shrinking import shrink, smaller_workloads
from tests.tiny_models import make_tiny_llama
from tests.workloads import make_workload


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(fuzz, "FUZZ_DIR", tmp_path / "failures")
    return str(make_tiny_llama(tmp_path / "model", max_position=128))


@pytest.mark.parametrize(
    ("name", "tier_name"),
    [
        ("hash_without_parent", "fast"),
        ("shared_block_written_in_place", "reference"),
        ("prompt_penalised", "reference"),
    ],
)
def test_a_planted_bug_is_found_and_made_small_and_can_be_replayed(
    model: str, name: str, tier_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with MUTANTS[name].planted(tier_name):
        with pytest.raises(AssertionError, match="twinfer diff") as caught:
            check_seeds(lambda _: model, range(60))
        (path,) = fuzz.FUZZ_DIR.glob("*.jsonl")
        assert f"twinfer diff {path}\n" in str(caught.value)
        small = read_workload(path)
        assert len(small.requests) <= 2
        assert len(small.config) < len(make_workload(0).config)
        assert twinfer(["diff", str(path)]) == 1
        with pytest.raises(fuzz.DisagreementError, match="the tiers part"):
            fuzz.main([str(path)])
    assert twinfer(["diff", str(path)]) == 0  # the bug is gone
    assert fuzz.main([str(path)]) == 0
    assert f"{path}: equal" in capsys.readouterr().out


def test_a_bug_of_both_tiers_is_found_by_the_cold_oracle(model: str) -> None:
    with MUTANTS["hash_without_parent"].planted("fast"), MUTANTS["hash_without_parent"].planted("reference"):
        with pytest.raises(AssertionError, match="alone, but both tiers say"):
            check_seeds(lambda _: model, range(60))
        (path,) = fuzz.FUZZ_DIR.glob("*.jsonl")
        assert len(read_workload(path).requests) <= 2


def make_requests(prompts: Sequence[int]) -> tuple[WorkloadRequest, ...]:
    params = SamplingParams(seed=3, max_tokens=20, top_k=5, min_tokens=9)
    return tuple(
        WorkloadRequest(f"r{i}", prompt_token_ids=(7,) * length, arrival_step=2, params=params)
        for i, length in enumerate(prompts)
    )


def test_shrinking_keeps_what_makes_a_workload_fail_and_nothing_else() -> None:
    def fails(workload: Workload) -> bool:
        long = [request for request in workload.requests if len(request.prompt_token_ids or ()) >= 6]
        return len(long) >= 2 and workload.config.get("block_size") == 4

    workload = Workload(
        make_requests([3, 9, 4, 17, 6, 2, 8]), {"block_size": 4, "seed": 1, "max_num_seqs": 3}
    )
    small = shrink(workload, fails)
    plain = SamplingParams(seed=3, max_tokens=1)
    assert small.config == {"block_size": 4}
    assert [(len(r.prompt_token_ids or ()), r.arrival_step, r.params) for r in small.requests] == [
        (6, 0, plain),
        (6, 0, plain),
    ]
    assert not any(fails(smaller) for smaller in smaller_workloads(small))


def test_shrinking_gives_up_after_so_many_checks() -> None:
    num_checks = 0

    def fails(workload: Workload) -> bool:
        nonlocal num_checks
        num_checks += 1
        return False

    workload = Workload(make_requests([3, 9, 4, 17]), {"block_size": 4})
    assert shrink(workload, fails, max_checks=5) == workload
    assert num_checks == 5


def test_a_workload_that_cannot_be_run_has_not_failed(model: str) -> None:
    workload = replace(make_workload(0), config={"block_size": 0})
    assert not fuzz.fails(model, workload)


def test_a_seed_always_gives_the_same_workload_and_others_give_others() -> None:
    assert make_workload(5) == make_workload(5)
    assert len({str(make_workload(seed)) for seed in range(20)}) == 20


def test_workloads_that_miss_a_path_do_not_pass() -> None:
    taken = Paths(taken=set(fuzz.FLOORS), num_tokens=100)
    assert_paths_were_taken([taken])
    for name in fuzz.FLOORS:
        with pytest.raises(AssertionError, match=name):
            assert_paths_were_taken([Paths(taken=set(fuzz.FLOORS) - {name}, num_tokens=100)])


def test_more_than_one_excused_token_in_100_000_does_not_pass() -> None:
    paths = Paths(set(fuzz.FLOORS), num_tokens=100_000, num_excused=1)
    assert_paths_were_taken([replace(paths, num_tokens=10)])
    assert_paths_were_taken([paths] * 2)
    with pytest.raises(AssertionError):
        assert_paths_were_taken([paths, replace(paths, num_tokens=99_999)])


def test_a_token_that_was_decided_by_rounding_is_excused_and_another_one_is_not(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=8, ignore_eos=True)
    request = WorkloadRequest("r0", prompt_token_ids=(5, 6, 7), params=params)
    cold = fuzz.run_cold(model, request, 0)
    position = len(cold.rows) - 1
    row = cold.rows[position]
    assert cold.decision(position, row).logit_gap == 0
    assert not cold.decision(position, row).is_excused  # nothing was close
    token_id = cold.output.token_ids[position]
    same = RequestOutput("r0", None, [], [cold.output], True, RequestMetrics(0))
    parted = [*cold.output.token_ids[:position], (token_id + 1) % 320]
    other = replace(same, outputs=[replace(cold.output, token_ids=parted)])
    with pytest.raises(fuzz.DisagreementError, match="token_ids of"):
        fuzz._equals_cold(model, request, other, 0, cold.rows)
    tied = replace(cold)  # the same run, had its last two best been as good as equal
    tied.rows = [*cold.rows[:position], nearly_tied(cold, position)]
    assert tied.decision(position, tied.rows[position]).is_excused
    assert not tied.decision(position, tied.rows[position] + 1).is_excused  # another model
    monkeypatch.setattr(fuzz, "run_cold", lambda *_: tied)
    assert not fuzz._equals_cold(model, request, other, 0, tied.rows)
    assert fuzz._equals_cold(model, request, same, 0, tied.rows)


def nearly_tied(cold: fuzz.ColdRun, position: int) -> np.ndarray:
    """Logits [V] whose two best scores, noise included, are 1e-5 apart."""
    data = cold.admitted
    params = data.sampling_params
    noise = gumbel_noise(data.seed, position, 320)
    scores = np.full(320, -50.0)
    scores[5], scores[9] = 30.0, 30.0 - 1e-5
    return np.asarray((scores - noise) * params.temperature)
