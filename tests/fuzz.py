"""Random whole runs: reference = fast = cold oracle, and what fails is made small.

The cold oracle is each sequence alone on the reference tier: no cache, no chunks, no company, no drafts, an ample pool.
A workload that fails is written as a JSONL file, which replays with

    twinfer diff FILE              both tiers in lockstep: where do they part
    python -m tests.fuzz FILE      the whole check, cold oracle included
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from reference.contracts.config import EngineConfig
from reference.contracts.logits import process_logits
from reference.contracts.noise import gumbel_noise
from reference.contracts.protocols import Tier
from reference.contracts.request import child_request_id
from reference.contracts.schedule import ModelRunnerOutput, NewRequestData, SchedulerOutput
from reference.frontend.diff import compare_tiers
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.margin import Decision, decision_margin
from reference.frontend.outputs import CompletionOutput, RequestOutput
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest, read_workload, run_workload, write_workload
from tests.shrinking import shrink
from tests.workloads import MAX_MODEL_LEN, TINY, Space, make_workload, with_models

# For failures to be replayed; git ignores it.
FUZZ_DIR = Path(os.environ.get("TWINFER_FUZZ_DIR") or Path(__file__).parent.parent / ".fuzz")


class DisagreementError(AssertionError):
    """Two of the three, reference, fast and cold oracle, do not agree."""


# Path -> the share of workloads that must take it: a run that does not proves nothing.
FLOORS = {
    "preempted": 0.3,
    "cached": 0.3,
    "accepted drafts": 0.2,
    "swapped": 0.1,
    "copied": 0.1,
    "aborted": 0.1,
    "scored prompts": 0.1,
}


@dataclass
class Paths:
    """What happened in a run."""

    taken: set[str] = field(default_factory=set)  # names of FLOORS
    num_tokens: int = 0
    num_excused: int = 0

    def watch(self, schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
        sampled = output.sampled_token_ids
        happened = {
            "preempted": schedule.preempted_req_ids,
            "swapped": schedule.swap_outs,
            "copied": schedule.block_copies,
            "cached": any(new.num_cached_tokens for new in schedule.scheduled_new_reqs),
            "accepted drafts": any(
                len(sampled.get(request_id, ())) > 1 for request_id in schedule.scheduled_spec_decode_tokens
            ),
        }
        self.taken |= {name for name, it in happened.items() if it}


class Rows(dict[str, list[np.ndarray]]):
    """The logits [V] that each token of a sequence was drawn from, by sequence."""

    def note(self, output: ModelRunnerOutput) -> None:
        logits = output.logits or {}
        for request_id, token_ids in output.sampled_token_ids.items():
            rows = np.atleast_2d(logits[request_id])  # [tokens sampled, V]
            self.setdefault(request_id, []).extend(rows[: len(token_ids)])
            for index, _ in enumerate(output.sibling_token_ids.get(request_id, ()), start=1):
                self.setdefault(child_request_id(request_id, index), []).append(rows[0])


class _WatchedRunner:
    def __init__(self, runner: Any, tier: WatchedTier) -> None:
        self._runner = runner
        self._tier = tier

    def execute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        try:
            if not self._tier.scheduler.config.async_scheduling:  # then it is planning in another thread
                self._tier.scheduler.check_integrity()
        except Exception as error:  # the engine would end the step's requests and go on
            self._tier.broken = self._tier.broken or error
        output: ModelRunnerOutput = self._runner.execute(schedule)
        self._tier.paths.watch(schedule, output)
        self._tier.rows.note(output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class WatchedTier:
    """A tier that notes which paths its scheduler took and what its tokens were drawn from, and checks its invariants
    in every step."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.paths = Paths()
        self.rows = Rows()
        self.scheduler: Any = None
        self.broken: Exception | None = None  # what the first check of invariants that failed has raised

    def make_scheduler(self, config: EngineConfig) -> Any:
        self.scheduler = self._tier.make_scheduler(config)
        return self.scheduler

    def make_model_runner(self, *args: Any) -> Any:
        return _WatchedRunner(self._tier.make_model_runner(*args), self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)


def check_workload(model: str, workload: Workload) -> Paths:
    """Compare both tiers step by step, and each sequence with its cold oracle.

    Raises:
        DisagreementError: with a sentence that says where.
        ValueError: the workload is not acceptable.
    """
    reference, fast = WatchedTier(load_tier("reference")), WatchedTier(load_tier("fast"))
    report = compare_tiers((reference, fast), model, workload)  # type: ignore[arg-type]
    if report.divergence is not None:
        raise DisagreementError(f"the tiers part: {report.divergence}")
    for tier in (reference, fast):
        if tier.broken is not None:
            raise DisagreementError(
                f"the {tier.name} tier breaks an invariant: {tier.broken!r}"
            ) from tier.broken
        if tier.scheduler.snapshot().cache.ref_counts:
            raise DisagreementError(f"the {tier.name} tier holds blocks for nobody")
    paths = reference.paths
    paths.num_tokens, paths.num_excused = report.num_tokens, len(report.excused)
    excused = {each.request_id for each in report.excused}
    for request in workload.requests:
        answer = report.finished[request.request_id]
        if prompt_logprobs(answer):
            paths.taken.add("scored prompts")
        for output in answer.outputs:
            sequence_id = child_request_id(request.request_id, output.index)
            if output.finish_reason == "abort":
                paths.taken.add("aborted")
            if sequence_id not in excused:
                rows = reference.rows.get(sequence_id, [])
                paths.num_excused += not _equals_cold(model, request, answer, output.index, rows)
    return paths


def _equals_cold(
    model: str, request: WorkloadRequest, answer: RequestOutput, index: int, rows: list[np.ndarray]
) -> bool:
    """False when the two part at a token that is excused by the rule of `margin.py`.

    Raises:
        DisagreementError: they part elsewhere.
    """
    cold, output = run_cold(model, request, index), answer.outputs[index]
    scores = prompt_logprobs(answer), cold.prompt_logprobs
    # An abort may come before the prompt is complete. Other chunks change logits by up to 1e-4, logprobs by twice that.
    if output.token_ids and (len(scores[0]) != len(scores[1]) or not np.allclose(*scores, rtol=0, atol=2e-4)):
        raise DisagreementError(f"the prompt logprobs of {request.request_id} are others than alone")
    ours, theirs = output.token_ids, cold.output.token_ids
    parted = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if parted is not None and cold.decision(parted, rows[parted]).is_excused:
        return False
    names: tuple[str, ...] = ("token_ids", "text", "finish_reason", "stop_reason")
    expected = cold.output
    if output.finish_reason == "abort":  # it came so far and no further
        expected, names = replace(expected, token_ids=theirs[: len(ours)]), ("token_ids",)
    for name in names:
        if getattr(expected, name) != getattr(output, name):
            raise DisagreementError(
                f"{name} of {request.request_id}, sequence {output.index}: {getattr(expected, name)!r} alone, but both "
                f"tiers say {getattr(output, name)!r}"
            )
    return True


@dataclass
class ColdRun:
    """A sequence on its own, and what its tokens were drawn from."""

    output: CompletionOutput
    prompt_logprobs: list[float]
    admitted: NewRequestData
    rows: list[np.ndarray]  # one a token, each [V]

    def decision(self, position: int, row: np.ndarray) -> Decision:
        """What decided a token; `row` [V] is what another run drew it from."""
        data, logits = self.admitted, self.rows[position]
        params = data.sampling_params
        prompt, output = data.token_ids[: data.num_prompt_tokens], self.output.token_ids[:position]
        margin = decision_margin(
            process_logits(logits, params, prompt, output),
            params.temperature,
            params.top_k,
            params.top_p,
            gumbel_noise(data.seed, position, len(logits)),
            params.min_p,
        )
        return Decision(margin, float(np.abs(logits - row).max()))


def run_cold(model: str, request: WorkloadRequest, index: int) -> ColdRun:
    """One of the n sequences, generated as a request of its own."""
    assert request.params.seed is not None
    params = replace(request.params, n=1, seed=request.params.seed + index)
    alone = Workload((WorkloadRequest("alone", prompt_token_ids=request.prompt_token_ids, params=params),))
    engine = _cold_engine(model)
    rows, admitted = Rows(), []

    def note(schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
        admitted.extend(schedule.scheduled_new_reqs)
        rows.note(output)

    engine.engine_core.on_step = note
    answer = run_workload(engine, alone)["alone"]
    return ColdRun(answer.outputs[0], prompt_logprobs(answer), admitted[0], rows.get("alone", []))


def prompt_logprobs(answer: RequestOutput) -> list[float]:
    """Of the prompt's tokens from the second on; empty when nobody asked for them."""
    return [next(iter(table.values())).logprob for table in answer.prompt_logprobs or () if table is not None]


@cache
def _cold_engine(model: str) -> LLMEngine:
    """One for all requests of a model: without a cache, and empty between them, it remembers nothing."""
    args = EngineArgs(
        model=model,
        enable_prefix_caching=False,
        max_num_seqs=1,
        max_model_len=MAX_MODEL_LEN,
        keep_logits=True,
    )
    engine = LLMEngine.from_engine_args(args, load_tier("reference"))
    engine.log_stats = False
    return engine


def check_seeds(
    model_of: Callable[[int], str],
    seeds: Iterable[int],
    space: Space = TINY,
    draft_model: str | None = None,
    **options: Any,
) -> list[Paths]:
    """Check the workloads of some seeds; a failure is made small, written down, and reported with its replay.

    `options` replace engine options of all workloads.
    """
    paths = []
    for seed in seeds:
        workload, model = make_workload(seed, space), model_of(seed)
        workload = replace(workload, config={**workload.config, **options})
        workload = with_models(workload, model, draft_model)
        try:
            paths.append(check_workload(model, workload))
        except Exception as error:
            path = write_failure(f"workload-{seed}", model, shrink(workload, lambda w: fails(model, w)))  # noqa: B023
            raise AssertionError(
                f"Workload {seed}: {error}\nMade small, it is {path}; replay it with\n  twinfer diff {path}\n"
                f"or, with the cold oracle, python -m tests.fuzz {path}"
            ) from error
    return paths


def assert_paths_were_taken(paths: list[Paths], floors: dict[str, float] = FLOORS) -> None:
    """Each path in its share of the workloads, and no more excused tokens than one in 100,000.

    One is let through where there are fewer tokens: which token it is depends on how the machine's BLAS adds.
    """
    shares = {name: sum(name in each.taken for each in paths) / len(paths) for name in floors}
    missed = {
        name: f"{shares[name]:.0%} of {least:.0%}" for name, least in floors.items() if shares[name] < least
    }
    assert not missed, f"the workloads do not go where they should: {missed}"
    num_tokens, num_excused = sum(each.num_tokens for each in paths), sum(each.num_excused for each in paths)
    print(f"{len(paths)} workloads, {num_tokens} tokens, {num_excused} excused")
    assert num_excused <= max(num_tokens // 100_000, 1)


def fails(model: str, workload: Workload) -> bool:
    """Whether the check of a workload fails. One that cannot even be run has not failed."""
    try:
        check_workload(model, workload)
    except ValueError:
        return False
    except Exception:
        return True
    return False


def write_failure(name: str, model: str, workload: Workload) -> Path:
    """Write a workload, and the model too if it is a folder that will soon be gone."""
    FUZZ_DIR.mkdir(parents=True, exist_ok=True)
    if Path(model).is_dir():
        kept = FUZZ_DIR / f"{name}-model"
        shutil.copytree(model, kept, dirs_exist_ok=True)
        model = str(kept.resolve())
    path = (FUZZ_DIR / f"{name}.jsonl").resolve()
    write_workload(replace(workload, config={**workload.config, "model": model}), path)
    return path


def main(arguments: list[str]) -> int:
    """Check the workload files that are named, cold oracle included."""
    for path in map(Path, arguments):
        workload = read_workload(path)
        config = dict(workload.config)
        paths = check_workload(config.pop("model"), replace(workload, config=config))
        print(f"{path}: equal; {', '.join(sorted(paths.taken)) or 'nothing special'} on the way")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
