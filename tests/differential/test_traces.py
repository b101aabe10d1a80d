"""Both tiers record the same trace of a real model, times aside: decisions, reasons, cache and tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reference.contracts.trace import StepTrace
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.tiers import load_tier
from reference.frontend.workload import run_workload
from tests.tiny_models import make_tiny_llama
from tests.workloads import make_workload, with_models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("model"), max_position=128))


def record(model: str, tier_name: str, seed: int) -> list[StepTrace]:
    workload = with_models(make_workload(seed), model, None)
    args = EngineArgs(**{**workload.config, "model": model, "trace": True})
    engine = LLMEngine.from_engine_args(args, load_tier(tier_name))
    run_workload(engine, workload)
    return [replace(trace, started=0.0, seconds=0.0) for trace in engine.engine_core.traces]


def test_both_tiers_record_the_same_trace_of_a_tiny_model(model: str) -> None:
    runs = [(record(model, "reference", seed), record(model, "fast", seed)) for seed in range(12)]
    for seed, (first, second) in enumerate(runs):
        assert first == second, f"workload {seed}"
        assert [repr(trace) for trace in first] == [repr(trace) for trace in second], (
            f"order, workload {seed}"
        )
    # Runs without these would show little.
    traces = [trace for first, _ in runs for trace in first]
    assert any(trace.preemption_reasons for trace in traces)
    assert any(trace.num_cached_tokens.get(name) for trace in traces for name in trace.num_cached_tokens)
    assert any(trace.state.cache.evicted for trace in traces)
    said = {reason.split(" waits: ")[1] for trace in traces for reason in trace.refusal_reasons.values()}
    assert any(reason.startswith("needs ") for reason in said)
    assert any(reason.startswith("max_num_seqs is ") for reason in said)
    assert "nobody is admitted in a step that preempts" in said
