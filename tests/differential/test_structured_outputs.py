"""Guided decoding in a whole engine with a real (tiny) model: the text is what was asked for, on both tiers alike."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from reference.contracts.logits import unpack_bitmask
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from reference.contracts.structured_outputs import StructuredOutputsParams
from reference.frontend.diff import compare_tiers
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest, run_workload
from tests.scripted import byte_tokenizer
from tests.tiny_models import make_tiny_llama

EOS = 1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no", "not at all"]
DATE = r"[12][0-9]{3}-(0[1-9]|1[0-2])"


def obeys_schema(text: str) -> bool:
    """By hand: what `SCHEMA` says."""
    value = json.loads(text)
    return (
        list(value) == ["name", "age", "tags"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and 1 <= len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "b"}
    )


def is_nested(text: str) -> bool:
    """x, in so many brackets on both sides."""
    depth = len(text) // 2
    return text == "(" * depth + "x" + ")" * depth


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


# What is asked for, how to check it by hand, and whether every answer comes to its end within 64 tokens.
KINDS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "regex": ({"regex": DATE}, lambda text: re.fullmatch(DATE, text)),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "schema": ({"json": SCHEMA, "disable_any_whitespace": True}, obeys_schema),
    "spaced schema": ({"json": SCHEMA}, obeys_schema),
    "grammar": ({"grammar": 'start: "(" start ")" | "x"'}, is_nested),
    "object": ({"json_object": True}, is_object),
}
ENDLESS = {"spaced schema", "grammar", "object"}  # a random model may go on with these for ever
LESS_WHITESPACE = dict.fromkeys(byte_tokenizer().encode(" \n\r\t"), -8.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("model")))


def asking(kind: str, **params: Any) -> SamplingParams:
    structured = StructuredOutputsParams(**KINDS[kind][0])
    return SamplingParams(**{"max_tokens": 64, "structured_outputs": structured, **params})


def generate(model: str, tier_name: str, *params: SamplingParams, **options: Any) -> list[RequestOutput]:
    """Another prompt under each of the parameters, all in one batch."""
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, **options), load_tier(tier_name))
    requests = tuple(
        WorkloadRequest(f"r{i}", prompt_token_ids=tuple(range(20 + i, 40 + i)), params=each)
        for i, each in enumerate(params)
    )
    finished = run_workload(engine, Workload(requests))
    return [finished[f"r{i}"] for i in range(len(params))]


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_that_ends_is_what_was_asked_for(model: str, tier_name: str, kind: str) -> None:
    bias = LESS_WHITESPACE if kind in ENDLESS else {}
    params = [asking(kind, temperature=0.0, logit_bias=bias)] * 4
    params += [asking(kind, temperature=1.5, seed=seed, logit_bias=bias) for seed in range(20)]
    outputs = [output.outputs[0] for output in generate(model, tier_name, *params)]
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert all(KINDS[kind][1](output.text) for output in ended)
    assert all(output.token_ids[-1] == EOS for output in ended)
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}
    assert len(ended) >= (5 if kind in ENDLESS else 24)
    assert len({output.text for output in ended}) > 1


def test_a_choice_never_taken_freely_is_taken_under_its_mask_whatever_follows(
    model: str, tier_name: str
) -> None:
    free, *guided = generate(
        model,
        tier_name,
        SamplingParams(temperature=0),
        asking("choice", temperature=0, repetition_penalty=1.5, logit_bias={5: 100}),
        asking("choice", temperature=1.5, top_k=3, seed=1),
        asking("choice", temperature=1.5, top_p=0.5, seed=2),
        asking("choice", temperature=1.5, min_p=0.3, seed=3),
    )
    assert free.outputs[0].text not in CHOICES
    assert all(output.outputs[0].text in CHOICES for output in guided)


def test_all_sequences_of_a_request_obey_and_each_goes_its_own_way(model: str, tier_name: str) -> None:
    (output,) = generate(model, tier_name, asking("schema", n=4, temperature=1.5, seed=3))
    assert [completion.finish_reason for completion in output.outputs] == ["stop"] * 4
    assert all(obeys_schema(completion.text) for completion in output.outputs)
    assert len({completion.text for completion in output.outputs}) > 1
    # The seed of sequence i is seed + i, so each is what a request of its own would give.
    alone = [generate(model, tier_name, asking("schema", temperature=1.5, seed=3 + i)) for i in range(4)]
    assert token_ids([output]) == [ids for outputs in alone for ids in token_ids(outputs)]


def test_tokens_do_not_depend_on_neighbours_chunks_or_preemptions(model: str, tier_name: str) -> None:
    params = [
        asking(kind, temperature=t, seed=7) for kind in ("regex", "schema", "object") for t in (0.0, 1.2)
    ]
    params.insert(3, SamplingParams(temperature=1.2, seed=7, max_tokens=30, ignore_eos=True))
    small = {"block_size": 4, "max_model_len": 100}
    ample = generate(model, tier_name, *params, num_blocks=400, **small)
    for options in (
        {"num_blocks": 400, "max_num_seqs": 1},
        {"num_blocks": 400, "max_num_batched_tokens": 7},
        {"num_blocks": 30, "enable_prefix_caching": False},
    ):
        outputs = generate(model, tier_name, *params, **small, **options)
        assert token_ids(outputs) == token_ids(ample)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_logprobs_are_those_of_the_raw_logits(model: str, tier_name: str) -> None:
    """Also in a batch whose every row is masked."""
    free = generate(model, tier_name, SamplingParams(temperature=0, logprobs=5))[0].outputs[0]
    guided = generate(model, tier_name, asking("choice", temperature=0, logprobs=5))[0].outputs[0]
    assert free.logprobs is not None
    assert guided.logprobs is not None
    best, with_masked = free.logprobs[0], guided.logprobs[0]
    assert {token_id: with_masked[token_id] for token_id in best} == best
    assert with_masked[guided.token_ids[0]].rank > 5


def test_a_stop_string_still_ends_the_text_in_the_middle(model: str, tier_name: str) -> None:
    (output,) = generate(model, tier_name, asking("regex", temperature=0, stop=["-"]))
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "-")
    assert re.fullmatch("[12][0-9]{3}", completion.text)


# Where the text must end


def test_an_output_that_ignores_the_end_goes_on_with_nothing_else(model: str, tier_name: str) -> None:
    (output,) = generate(
        model, tier_name, asking("regex", temperature=1.5, seed=0, ignore_eos=True, max_tokens=20)
    )
    completion = output.outputs[0]
    assert re.fullmatch(DATE, completion.text)
    assert completion.finish_reason == "length"
    first = completion.token_ids.index(EOS)
    assert set(completion.token_ids[first:]) == {EOS}
    assert len(completion.token_ids) == 20


def test_min_tokens_keeps_a_text_going_that_may_end_and_is_an_error_where_it_must(
    model: str, tier_name: str
) -> None:
    any_length = StructuredOutputsParams(regex="[a-c]*")
    longer, dead_end, other = generate(
        model,
        tier_name,
        SamplingParams(temperature=0, min_tokens=12, logit_bias={EOS: 100}, structured_outputs=any_length),
        asking("choice", temperature=0, min_tokens=30),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    )
    ids = longer.outputs[0].token_ids
    assert (ids.index(EOS), longer.outputs[0].finish_reason) == (12, "stop")
    assert dead_end.outputs[0].finish_reason == "error"
    assert dead_end.error is not None
    assert "structured_outputs" in dead_end.error
    assert (other.outputs[0].finish_reason, len(other.outputs[0].token_ids)) == ("length", 9)


def test_a_stop_token_is_a_token_like_any_other_and_ends_the_text_where_it_is_allowed(
    model: str, tier_name: str
) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=model), load_tier(tier_name))
    (dash,), (letter,) = engine.tokenizer.encode("-"), engine.tokenizer.encode("q")
    stopped, untouched = generate(
        model,
        tier_name,
        asking("regex", temperature=0, stop_token_ids=[dash]),
        asking("regex", temperature=0, stop_token_ids=[letter], logit_bias={letter: 100}),
    )
    assert (stopped.outputs[0].stop_reason, len(stopped.outputs[0].token_ids)) == (dash, 5)
    assert re.fullmatch(DATE, untouched.outputs[0].text)


def test_a_grammar_that_becomes_too_complex_ends_its_request_with_an_error_and_no_other(
    model: str, tier_name: str
) -> None:
    hard = StructuredOutputsParams(regex="(a{1000}){1000}")
    failed, other = generate(
        model,
        tier_name,
        SamplingParams(structured_outputs=hard, max_tokens=64),
        asking("choice", temperature=0),
    )
    assert failed.outputs[0].finish_reason == "error"
    assert failed.error is not None
    assert "left no token" in failed.error
    assert other.outputs[0].text in CHOICES


def test_a_refused_grammar_leaves_the_engine_as_it_was(model: str, tier_name: str) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=model), load_tier(tier_name))
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(unclosed"))
    with pytest.raises(ValueError, match="structured_outputs.regex cannot be compiled"):
        engine.add_request("a", "x", bad)
    assert not engine.has_unfinished_requests()
    engine.add_request("a", "x", SamplingParams(max_tokens=1))  # the id is free


# With speculation


def speculating(model: str, method: str, k: int = 4) -> dict[str, Any]:
    """Drafts from the text itself, or from the model itself, which knows nothing of grammars."""
    if method == "ngram":
        return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1}
    return {"method": "draft_model", "model": model, "num_speculative_tokens": k}


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_tokens_are_those_of_no_speculation_and_drafts_obey_the_grammar(
    model: str, tier_name: str, method: str
) -> None:
    params = [asking(kind, temperature=t, seed=3) for kind in KINDS for t in (0.0, 1.2)]
    params += [
        asking("regex", temperature=0, ignore_eos=True),
        asking("schema", temperature=1.2, n=3, seed=5),
        asking("regex", temperature=1.2, min_tokens=7, seed=5, frequency_penalty=0.5),
        SamplingParams(
            temperature=0, max_tokens=64, structured_outputs=StructuredOutputsParams(regex="(ab){20}c")
        ),
    ]
    plain = generate(model, tier_name, *params, max_model_len=128)
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=model, max_model_len=128, speculative=speculating(model, method)),
        load_tier(tier_name),
    )
    requests = tuple(
        WorkloadRequest(f"r{i}", prompt_token_ids=tuple(range(20 + i, 40 + i)), params=each)
        for i, each in enumerate(params)
    )
    finished = run_workload(engine, Workload(requests))
    outputs = [finished[f"r{i}"] for i in range(len(params))]
    assert token_ids(outputs) == token_ids(plain)
    assert [o.outputs[0].finish_reason for o in outputs] == [o.outputs[0].finish_reason for o in plain]
    metrics = engine.metrics.snapshot()
    assert 0 < metrics.num_accepted_tokens <= metrics.num_draft_tokens
    # A model that guesses for itself draws alike, so what the grammar lets pass is right.
    assert (metrics.num_accepted_tokens == metrics.num_draft_tokens) == (method == "draft_model")


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_no_draft_is_checked_that_the_grammar_forbids(model: str, tier_name: str, method: str) -> None:
    """Each draft of a step has its bit in the row before it."""
    num_checked = 0

    def look(schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
        nonlocal num_checked
        for request_id, drafts in schedule.scheduled_spec_decode_tokens.items():
            rows = [unpack_bitmask(row, 320) for row in schedule.grammar_bitmasks[request_id]]
            assert len(rows) == 1 + len(drafts)
            assert all(row[draft] for row, draft in zip(rows, drafts, strict=False))
            num_checked += len(drafts)

    args = EngineArgs(model=model, max_model_len=128, speculative=speculating(model, method))
    engine = LLMEngine.from_engine_args(args, load_tier(tier_name), look)
    params = asking("spaced schema", temperature=1.2, seed=1)
    run_workload(
        engine, Workload((WorkloadRequest("a", prompt_token_ids=tuple(range(20, 40)), params=params),))
    )
    assert num_checked > 0


# Both tiers in lockstep


def workload(num_blocks: int) -> Workload:
    requests = tuple(
        WorkloadRequest(
            f"{kind}-{t}",
            prompt_token_ids=tuple(range(20, 40)),
            arrival_step=i,
            params=asking(kind, temperature=t, seed=i, n=1 + i % 3, max_tokens=40),
        )
        for i, (kind, t) in enumerate((kind, t) for kind in KINDS for t in (0.0, 1.3))
    )
    config = {"block_size": 4, "num_blocks": num_blocks, "max_num_batched_tokens": 30, "max_model_len": 64}
    return Workload(requests, config)


@pytest.mark.parametrize("num_blocks", [40, 400])
@pytest.mark.parametrize(
    "drafts", [None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}]
)
def test_tokens_tables_and_schedule_are_equal_on_both_tiers(
    model: str, num_blocks: int, drafts: dict[str, Any] | None
) -> None:
    tiers = (load_tier("reference"), load_tier("fast"))
    report = compare_tiers(tiers, model, workload(num_blocks), speculative=drafts)
    assert report.divergence is None
    assert report.excused == []
    assert report.num_errors == 0
    assert report.num_finished == 2 * len(KINDS)
    assert (report.num_preemptions > 0) == (num_blocks == 40)


@pytest.mark.embedded
def test_the_embedded_model_answers_by_a_schema_and_equally_on_both_tiers() -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "country": {"type": "string"},
            "population": {"type": "integer"},
        },
        "required": ["city", "country", "population"],
        "additionalProperties": False,
    }
    question = {"role": "user", "content": "Describe Paris as JSON with city, country and population."}
    params = SamplingParams(
        temperature=0, max_tokens=64, structured_outputs=StructuredOutputsParams(json=schema)
    )
    one = Workload((WorkloadRequest("a", messages=(question,), params=params),))
    report = compare_tiers((load_tier("reference"), load_tier("fast")), "smollm2-135m", one)
    assert report.divergence is None
    assert report.excused == []
    engine = LLMEngine.from_engine_args(EngineArgs(), load_tier("fast"))
    completion = run_workload(engine, one)["a"].outputs[0]
    answer = json.loads(completion.text)
    assert completion.finish_reason == "stop"
    assert (answer["city"], answer["country"], type(answer["population"])) == ("Paris", "France", int)
