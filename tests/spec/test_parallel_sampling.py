"""n > 1 as a caller sees it: one request, n outputs, on both tiers with a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.cli import main
from reference.frontend.diff import compare_tiers
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm import LLM
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput
from reference.frontend.tiers import load_tier
from reference.frontend.trace_file import read_trace, write_trace
from reference.frontend.workload import Workload, WorkloadRequest
from tests.tiny_models import make_tiny_llama

PROMPT = list(range(10, 47))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("model")))


def make_engine(model: str, tier: Tier) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(model=model), tier)


def run(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def test_sequence_i_has_the_tokens_of_a_request_of_its_own_with_seed_plus_i(model: str, tier: Tier) -> None:
    llm = LLM(tier, model)
    params = SamplingParams(n=4, seed=2**64 - 2, temperature=2.0, max_tokens=9, ignore_eos=True)
    (together,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert [completion.index for completion in together.outputs] == [0, 1, 2, 3]
    for completion in together.outputs:
        seed = (2**64 - 2 + completion.index) % 2**64
        alone = SamplingParams(seed=seed, temperature=2.0, max_tokens=9, ignore_eos=True)
        (expected,) = llm.generate([PROMPT], alone, use_tqdm=False)
        assert completion.token_ids == expected.outputs[0].token_ids
        assert completion.text == expected.outputs[0].text
    # The first tokens too: they are drawn from one row of logits, before there are siblings.
    assert len({completion.token_ids[0] for completion in together.outputs}) == 4
    assert together.metrics.num_output_tokens == 36


def test_greedy_sequences_are_all_the_same(model: str, tier: Tier) -> None:
    params = SamplingParams(n=3, temperature=0, max_tokens=5, ignore_eos=True)
    (output,) = LLM(tier, model).generate([PROMPT], params, use_tqdm=False)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 1


def test_57_a_request_is_finished_when_all_its_sequences_are(model: str, tier: Tier) -> None:
    engine = make_engine(model, tier)
    params = SamplingParams(n=3, seed=0, max_tokens=12, ignore_eos=True)
    engine.add_request("plain", PROMPT, params)
    plain = run(engine)[-1]
    # A token that only one sequence draws, in the middle of it, as a stop token for all.
    early = plain.outputs[1].token_ids[4]
    assert (
        early not in plain.outputs[0].token_ids + plain.outputs[2].token_ids + plain.outputs[1].token_ids[:4]
    )
    stopping = SamplingParams(n=3, seed=0, max_tokens=12, ignore_eos=True, stop_token_ids=[early])
    engine.add_request("a", PROMPT, stopping)
    outputs = run(engine)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    last = outputs[-1]
    assert [completion.finish_reason for completion in last.outputs] == ["length", "stop", "length"]
    assert [len(completion.token_ids) for completion in last.outputs] == [12, 5, 12]
    deltas = ["".join(output.outputs[i].delta_text for output in outputs) for i in range(3)]
    assert deltas == [completion.text for completion in last.outputs]


def test_a_stop_string_ends_only_the_sequence_that_wrote_it(model: str, tier: Tier) -> None:
    engine = make_engine(model, tier)
    params = SamplingParams(n=3, seed=0, max_tokens=12, ignore_eos=True)
    engine.add_request("plain", PROMPT, params)
    texts = [completion.text for completion in run(engine)[-1].outputs]
    stop = next(
        texts[1][i : i + 2]
        for i in range(2, len(texts[1]) - 2)
        if texts[1][i : i + 2] not in texts[0]
        and texts[1][i : i + 2] not in texts[2]
        and "\ufffd" not in texts[1][i : i + 2]
    )
    engine.add_request("a", PROMPT, SamplingParams(n=3, seed=0, max_tokens=12, ignore_eos=True, stop=stop))
    last = run(engine)[-1]
    assert [completion.finish_reason for completion in last.outputs] == ["length", "stop", "length"]
    assert last.outputs[1].stop_reason == stop
    assert last.outputs[1].text == texts[1][: texts[1].index(stop)]
    engine.engine_core.scheduler.check_integrity()
    assert not engine.engine_core.scheduler.requests


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_57_aborting_the_request_ends_all_its_sequences(model: str, tier: Tier, num_steps: int) -> None:
    engine = make_engine(model, tier)
    engine.add_request("a", PROMPT, SamplingParams(n=3, max_tokens=20, ignore_eos=True))
    for _ in range(num_steps):
        engine.step()
    (output,) = engine.abort_request("a")
    assert output.finished
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 3
    assert [len(completion.token_ids) for completion in output.outputs] == [num_steps] * 3
    assert not engine.has_unfinished_requests()
    assert not engine.output_processor.sequences
    assert engine.engine_core.scheduler.snapshot().cache.ref_counts == {}


def test_the_ids_of_sequences_cannot_be_taken_by_other_requests(model: str, tier: Tier) -> None:
    engine = make_engine(model, tier)
    engine.add_request("a", PROMPT, SamplingParams(n=2, max_tokens=2))
    with pytest.raises(ValueError, match="'1_a' is already in the engine"):
        engine.add_request("1_a", PROMPT, SamplingParams())
    engine.add_request("2_b", PROMPT, SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="'2_b' is already in the engine"):
        engine.add_request("b", PROMPT, SamplingParams(n=3))
    run(engine)
    engine.add_request("1_a", PROMPT, SamplingParams(max_tokens=1))
    assert run(engine)[-1].finished


@pytest.mark.parametrize("n", [0, 65, -1, True, 1.0, "2"])
def test_n_out_of_range_or_of_another_type_is_refused(n: object) -> None:
    with pytest.raises(ValueError, match=r"^n must be"):
        SamplingParams(n=n)  # type: ignore[arg-type]


def test_json_has_an_output_for_each_sequence(
    model: str, tier_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "generate",
        "--model",
        model,
        "--tier",
        tier_name,
        "--json",
        "--n",
        "3",
        "--max-tokens",
        "4",
        "Hi",
    ]
    assert main(arguments) == 0
    line = json.loads(capsys.readouterr().out)
    assert [output["index"] for output in line["outputs"]] == [0, 1, 2]
    assert line["metrics"]["num_output_tokens"] == sum(len(output["token_ids"]) for output in line["outputs"])


def test_both_tiers_are_equal_through_copies_and_preemptions_of_siblings(model: str) -> None:
    params = SamplingParams(n=4, seed=5, max_tokens=20, ignore_eos=True)
    requests = tuple(
        WorkloadRequest(f"r{i}", prompt_token_ids=tuple(range(10 + i, 24 + i)), arrival_step=i, params=params)
        for i in range(3)
    )
    workload = Workload(requests, {"block_size": 4, "num_blocks": 22})
    report = compare_tiers((load_tier("reference"), load_tier("fast")), model, workload)
    assert report.divergence is None
    assert report.num_tokens == 3 * 4 * 20
    assert report.num_preemptions > 0


def test_n_survives_the_workload_file(tmp_path: Path) -> None:
    from reference.frontend.workload import read_workload, write_workload

    workload = Workload((WorkloadRequest("a", prompt="Hi", params=SamplingParams(n=5)),))
    write_workload(workload, tmp_path / "w.jsonl")
    assert read_workload(tmp_path / "w.jsonl") == workload


def test_the_trace_records_copies_and_the_first_tokens_of_siblings(
    model: str, tier: Tier, tmp_path: Path
) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, trace=True), tier)
    engine.add_request("a", PROMPT, SamplingParams(n=3, max_tokens=3, ignore_eos=True))
    last = run(engine)[-1]
    traces = engine.engine_core.traces
    assert list(traces[0].sampled_token_ids) == ["a", "1_a", "2_a"]
    assert [ids[0] for ids in traces[0].sampled_token_ids.values()] == [c.token_ids[0] for c in last.outputs]
    # 37 tokens: two full blocks of 16, and 5 tokens in block 3, which two of three writers copy.
    assert [trace.block_copies for trace in traces] == [(), ((2, 3, 4), (2, 3, 5)), ()]
    write_trace(traces, tmp_path / "run.json")
    assert read_trace(tmp_path / "run.json") == traces


def test_siblings_count_as_one_admission_and_their_shared_prompt_as_no_hit(model: str, tier: Tier) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, trace=True), tier)
    engine.add_request("a", PROMPT, SamplingParams(n=3, max_tokens=3, ignore_eos=True))
    run(engine)
    metrics = engine.metrics.snapshot()
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (len(PROMPT), 0)
    assert metrics.resumed_prefix_cache_queries == 0
    assert metrics.prompt_tokens == len(PROMPT)
    assert metrics.generation_tokens == 9
    assert metrics.requests_finished == {"length": 1}
    assert [trace.num_cached_tokens for trace in engine.engine_core.traces] == [{"a": 0}, {}, {}]
