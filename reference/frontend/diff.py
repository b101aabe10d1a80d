"""`twinfer diff`: both tiers run one workload in lockstep, and the first difference is shown.

Compared in every step: the schedule (tokens per request, in order), preemptions and refusals with their reasons, both
queues, block tables, reference counts, the order of the free queue, hashes, evictions, cache hits, and the sampled
tokens.

A token may differ for one honest reason: two float32 sums in different order, at a decision that was closer than that.
Such a token is excused by the rule of `margin.py`, counted, and the comparison of its request ends there, as does that
of the schedule, because from then on the two runs are different workloads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from reference.contracts.logits import process_logits
from reference.contracts.noise import gumbel_noise
from reference.contracts.protocols import Tier
from reference.contracts.request import child_request_id, child_seed
from reference.contracts.schedule import ModelRunnerOutput, NewRequestData, SchedulerOutput
from reference.contracts.trace import StepTrace
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.margin import Decision, decision_margin
from reference.frontend.outputs import CompletionOutput, RequestOutput
from reference.frontend.workload import Workload, WorkloadRun

BlockTable = tuple[int, ...]
_SCHEDULE_FIELDS = (
    "num_scheduled_tokens", "kinds", "preempted", "draft_token_ids", "swap_outs", "swap_ins",
    "preemption_reasons", "refusal_reasons", "num_cached_tokens",
    "block_copies",
)  # fmt: skip


@dataclass(frozen=True)
class Divergence:
    """A place at which two runs differ."""

    step: int  # of the workload
    what: str  # a field of the trace, or "token" with its output position
    values: tuple[Any, Any]
    request_id: str | None = None
    decision: Decision | None = None  # of a token
    block_tables: tuple[BlockTable, BlockTable] = ((), ())  # of the request, in that step


@dataclass
class DiffReport:
    """Result of a comparison, with the counts that show which paths were taken."""

    tier_names: tuple[str, str]
    num_steps: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    num_swapped_blocks: int = 0  # to the host pool
    num_block_copies: int = 0
    num_accepted_drafts: int = 0
    num_cached_tokens: int = 0
    num_finished: int = 0
    num_errors: int = 0  # of the finished, those that ended with an error, on both tiers alike
    finished: dict[str, RequestOutput] = field(default_factory=dict)  # last outputs on the first tier
    excused: list[Divergence] = field(default_factory=list)
    divergence: Divergence | None = None

    @property
    def is_equal(self) -> bool:
        return self.divergence is None


class _Draw(NamedTuple):
    """A sampled token and what it was chosen by."""

    token_id: int
    logits: np.ndarray  # float32 [V]
    bitmask: np.ndarray | None  # int32 [cdiv(V, 32)], of a request with a grammar


class _Side:
    """One tier's engine, with what its last step left: a trace, and each sampled token with its logits."""

    def __init__(self, tier: Tier, args: EngineArgs, workload: Workload) -> None:
        self.engine = LLMEngine.from_engine_args(args, tier, on_step=self._on_step)
        self.engine.log_stats = False  # in lockstep the rates of one side mean nothing
        self.run = WorkloadRun(self.engine, workload)
        self.admissions: dict[str, NewRequestData] = {}  # the last of each request
        self.outputs: dict[str, list[int]] = {}
        # (request, output position) -> the draw; taken out once the other side has it too
        self.unmatched: dict[tuple[str, int], _Draw] = {}
        self.trace: StepTrace | None = None  # of the last step; None when the engine had nothing to do

    def _on_step(self, schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
        for new in schedule.scheduled_new_reqs:
            self.admissions[new.request_id] = new
        logits = output.logits or {}
        bitmasks = schedule.grammar_bitmasks
        for request_id, token_ids in output.sampled_token_ids.items():
            for j, (token_id, row) in enumerate(zip(token_ids, logits[request_id], strict=True)):
                bitmask = bitmasks[request_id][j] if request_id in bitmasks else None
                self._add(request_id, _Draw(token_id, row, bitmask))
        for request_id, token_ids in output.sibling_token_ids.items():
            for index, token_id in enumerate(token_ids, start=1):
                parent, sibling_id = self.admissions[request_id], child_request_id(request_id, index)
                seed = child_seed(parent.seed, index)
                self.admissions[sibling_id] = replace(parent, request_id=sibling_id, seed=seed)
                bitmask = bitmasks[request_id][0] if request_id in bitmasks else None
                self._add(
                    sibling_id, _Draw(token_id, logits[request_id][0], bitmask)
                )  # they are drawn from one row

    def _add(self, request_id: str, draw: _Draw) -> None:
        output = self.outputs.setdefault(request_id, [])
        self.unmatched[request_id, len(output)] = draw
        output.append(draw.token_id)

    def step(self) -> None:
        traces = self.engine.engine_core.traces
        traces.clear()
        self.run.step()
        self.trace = traces[0] if traces else None

    def block_table(self, request_id: str) -> BlockTable:
        return () if self.trace is None else self.trace.state.cache.block_tables.get(request_id, ())


def compare_tiers(tiers: tuple[Tier, Tier], model: str, workload: Workload, **options: Any) -> DiffReport:
    """Run a workload on two tiers in lockstep.

    Args:
        tiers: usually reference, which runs on the CPU, and fast, which runs on the device of the options.
        model: as in `EngineArgs`.
        workload: its `config` gives engine options, which `options` override.

    Raises:
        ValueError: the workload or an option is not acceptable.
    """
    args = EngineArgs(**{**workload.config, "model": model, **options, "trace": True, "keep_logits": True})
    first = _Side(tiers[0], replace(args, device="cpu"), workload)
    # A GPU would have room for more.
    num_blocks = first.engine.engine_core.config.cache.num_blocks
    sides = (first, _Side(tiers[1], replace(args, num_blocks=num_blocks, kv_cache_memory=None), workload))
    comparison = _Comparison(workload, sides)
    report = comparison.report
    while report.is_equal and not all(side.run.is_done for side in sides):
        comparison.step()
    if report.is_equal:
        comparison.compare_ends()
    return report


class _Comparison:
    """Compares step by step until a token is excused, and from then on the other requests' tokens by position."""

    def __init__(self, workload: Workload, sides: tuple[_Side, _Side]) -> None:
        self.request_ids = [request.request_id for request in workload.requests]
        self.aborted = {r.request_id for r in workload.requests if r.abort_step is not None}
        self.sides = sides
        first, second = (side.engine.engine_core.tier_name for side in sides)
        self.report = DiffReport((first, second))
        self.dropped: set[str] = set()  # requests with an excused token

    def step(self) -> None:
        report = self.report
        for side in self.sides:
            side.step()
        first, second = (side.trace for side in self.sides)
        number = self.sides[0].run.step_number - 1
        report.num_steps += 1
        if first is not None:
            report.num_preemptions += len(first.preempted)
            report.num_swapped_blocks += len(first.swap_outs)
            report.num_block_copies += len(first.block_copies)
            sampled = (first.sampled_token_ids.get(request_id, ()) for request_id in first.draft_token_ids)
            report.num_accepted_drafts += sum(max(len(token_ids) - 1, 0) for token_ids in sampled)
            report.num_cached_tokens += sum(first.num_cached_tokens.values())
        if not self.dropped:
            self._compare_schedules(number, first, second)
        if report.is_equal:
            self._match_tokens(number)
        if report.is_equal and not self.dropped and first is not None and second is not None:
            self._compare_field(number, "finished", first.finished, second.finished)

    def _compare_schedules(self, number: int, first: StepTrace | None, second: StepTrace | None) -> None:
        if first is None or second is None:
            self._compare_field(number, "a step was run", first is not None, second is not None)
            return
        for name in _SCHEDULE_FIELDS:
            self._compare_field(number, name, getattr(first, name), getattr(second, name))
        for name in ("running", "waiting", "swapped", "num_tokens", "num_computed_tokens"):
            self._compare_field(number, name, getattr(first.state, name), getattr(second.state, name))
        for name in ("block_tables", "ref_counts", "free_order", "hashes", "evicted", "host_tables"):
            self._compare_field(
                number, name, getattr(first.state.cache, name), getattr(second.state.cache, name)
            )

    def _compare_field(self, number: int, what: str, first: Any, second: Any) -> None:
        """Record a difference, unless there is one already. The order of a table counts too: it is the schedule."""
        as_lists = [list(value.items()) if isinstance(value, dict) else value for value in (first, second)]
        if self.report.is_equal and as_lists[0] != as_lists[1]:
            differing = None
            if isinstance(first, dict) and isinstance(second, dict):
                keys = (*first, *second)
                differing = next((key for key in keys if first.get(key) != second.get(key)), None)
                if differing is not None:
                    first, second = first.get(differing), second.get(differing)
            request_id = differing if isinstance(differing, str) else None
            label = what if differing is None or request_id is not None else f"{what} of block {differing}"
            self._record(number, label, (first, second), request_id)

    def _record(
        self,
        number: int,
        what: str,
        values: tuple[Any, Any],
        request_id: str | None,
        decision: Decision | None = None,
    ) -> None:
        first, second = (() if request_id is None else side.block_table(request_id) for side in self.sides)
        divergence = Divergence(number, what, values, request_id, decision, (first, second))
        if decision is not None and decision.is_excused and request_id is not None:
            self.report.excused.append(divergence)
            self.dropped.add(request_id)
        elif self.report.divergence is None:
            self.report.divergence = divergence

    def _match_tokens(self, number: int) -> None:
        """Compare the tokens that both sides have sampled by now."""
        mine, theirs = (side.unmatched for side in self.sides)
        for key in [key for key in mine if key in theirs]:
            request_id, position = key
            draw, other = mine.pop(key), theirs.pop(key)
            if request_id in self.dropped:
                continue
            self.report.num_tokens += 1
            if draw.token_id != other.token_id:
                decision = self._decision(request_id, position, draw, other)
                tokens = (draw.token_id, other.token_id)
                self._record(number, f"token {position}", tokens, request_id, decision)
        if not self.dropped:
            for request_id, position in (*mine, *theirs):
                sampled = tuple((request_id, position) in side.unmatched for side in self.sides)
                self._record(number, f"token {position} was sampled", (sampled[0], sampled[1]), request_id)
                return

    def _decision(self, request_id: str, position: int, draw: _Draw, other: _Draw) -> Decision:
        side = self.sides[0]
        admitted, output = side.admissions[request_id], side.outputs[request_id][:position]
        params, prompt = admitted.sampling_params, admitted.token_ids[: admitted.num_prompt_tokens]
        noise = gumbel_noise(admitted.seed, position, len(draw.logits))  # [V]
        processed = process_logits(draw.logits, params, prompt, output, draw.bitmask)  # [V]
        return Decision(
            margin=decision_margin(
                processed, params.temperature, params.top_k, params.top_p, noise, params.min_p
            ),
            logit_gap=float(np.abs(draw.logits - other.logits).max()),
        )

    def compare_ends(self) -> None:
        """How the requests ended; after an excuse this is where a missing token shows."""
        first, second = (side.run.finished for side in self.sides)
        number = self.sides[0].run.step_number - 1
        for request_id in self.request_ids:
            # Without equal schedules an abort strikes where it strikes.
            if self.dropped and request_id in self.aborted:
                continue
            for one, other in zip(first[request_id].outputs, second[request_id].outputs, strict=True):
                sequence_id = child_request_id(request_id, one.index)
                ends = (_end(one), _end(other))
                if sequence_id not in self.dropped and ends[0] != ends[1]:
                    what = "end (finish reason, stop reason, tokens, text)"
                    self._record(number, what, ends, sequence_id)
        self.report.finished = first
        self.report.num_finished = len(first)
        self.report.num_errors = sum(output.error is not None for output in first.values())


def _end(completion: CompletionOutput) -> tuple[object, ...]:
    return completion.finish_reason, completion.stop_reason, len(completion.token_ids), completion.text
