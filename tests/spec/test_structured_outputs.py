"""Guided decoding without a model: parameters, the masks of a grammar, what ends a text, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reference.contracts.config import SpeculativeConfig
from reference.contracts.logits import process_logits, unpack_bitmask
from reference.contracts.protocols import Tier
from reference.contracts.request import Request, append_and_check_stop
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.structured_outputs import KINDS, StructuredOutputsParams
from reference.frontend.engine_core import EngineCore
from reference.frontend.input_processor import InputProcessor
from reference.frontend.structured_output import (
    MAX_GRAMMAR_CHARACTERS,
    GrammarCompiler,
    StructuredOutputGrammar,
)
from reference.frontend.workload import (
    Workload,
    WorkloadRequest,
    parse_workload,
    read_workload,
    write_workload,
)
from tests.factories import Driver, make_config, make_request
from tests.scripted import EOS, NO_WEIGHTS, VOCAB_SIZE, ScriptedTier, byte_tokenizer, make_scripted_config
from tests.spec.test_sampler import TierSampler, random_logits

MODEL = make_scripted_config().model
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
EXAMPLES: list[dict[str, Any]] = [
    {"regex": "(ab?|c)+-[0-9]{2}"},
    {"choice": ["teeth", "tea", "other"]},
    {"json": SCHEMA},
    {"json_object": True, "disable_any_whitespace": True},
    {"grammar": 'start: "(" start ")" | "x"'},
    {"regex": "a*"},
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(MODEL, byte_tokenizer())


def compile_one(compiler: GrammarCompiler, **params: Any) -> StructuredOutputGrammar:
    return compiler.compile(StructuredOutputsParams(**params))


def ids(text: str) -> list[int]:
    return byte_tokenizer().encode(text)


def allowed(grammar: StructuredOutputGrammar, drafts: Sequence[int] = ()) -> set[int]:
    """The tokens that may follow the output and these drafts."""
    return set(np.flatnonzero(unpack_bitmask(grammar.bitmask(drafts)[-1], VOCAB_SIZE)).tolist())


def accept(grammar: StructuredOutputGrammar, token_ids: Sequence[int]) -> StructuredOutputGrammar:
    for token_id in token_ids:
        grammar.accept(token_id)
    return grammar


# Parameters


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "needs exactly one of json, regex, choice, grammar, json_object; got none"),
        ({"regex": "a", "choice": ["b"]}, "needs exactly one of .*; got regex and choice"),
        ({"json": "{", "json_object": False}, "json is no valid JSON"),
        ({"json": "[1]"}, "json must be a JSON schema, which is a table"),
        ({"json": 5}, "json must be a JSON schema"),
        ({"json": {"a": {1, 2}}}, "json is no valid JSON"),
        ({"json": {"a": float("nan")}}, "json is no valid JSON"),
        ({"json_object": 1}, "json_object must be true or false, got 1"),
        ({"regex": ""}, "regex must be a text that is not empty"),
        ({"regex": 5}, "regex must be a text"),
        ({"grammar": "\ud800"}, "grammar must be valid Unicode"),
        ({"choice": []}, "choice must be a list of at least one text"),
        ({"choice": "yes"}, "choice must be a list"),
        ({"choice": ["yes", ""]}, "choice must be a text that is not empty"),
        (
            {"regex": "a", "disable_any_whitespace": True},
            "disable_any_whitespace is about JSON; leave it out",
        ),
    ],
)
def test_parameters_that_make_no_sense_are_refused_in_one_sentence(
    params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^structured_outputs[^\n]*{message}[^\n]*\.$"):
        StructuredOutputsParams(**params)


def test_sampling_params_take_the_object_and_nothing_else() -> None:
    with pytest.raises(ValueError, match="structured_outputs must be StructuredOutputsParams, got {'regex'"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_a_schema_as_a_table_and_as_text_is_the_same_and_keeps_the_order_of_its_properties() -> None:
    from_table = StructuredOutputsParams(json=SCHEMA)
    from_text = StructuredOutputsParams(json=json.dumps(SCHEMA, indent=2))
    assert from_table == from_text
    assert hash(SamplingParams(structured_outputs=from_table)) == hash(
        SamplingParams(structured_outputs=from_text)
    )
    other_order = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}  # type: ignore[attr-defined]
    assert StructuredOutputsParams(json=other_order) != from_table


def test_the_parameters_do_not_change_with_the_callers_table() -> None:
    table, choices = {"type": "object"}, ["a"]
    by_schema, by_choice = StructuredOutputsParams(json=table), StructuredOutputsParams(choice=choices)
    table["type"] = "string"
    choices.append("b")
    assert (by_schema.json, by_choice.choice) == ('{"type": "object"}', ("a",))


@pytest.mark.parametrize("params", EXAMPLES)
def test_a_workload_file_gives_back_what_was_written(params: dict[str, Any], tmp_path: Any) -> None:
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(**params))
    workload = Workload((WorkloadRequest("a", prompt="x", params=sampling),))
    write_workload(workload, tmp_path / "w.jsonl")
    assert read_workload(tmp_path / "w.jsonl") == workload
    line = json.loads((tmp_path / "w.jsonl").read_text(encoding="utf-8"))
    assert line["sampling_params"]["structured_outputs"] == params


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('"a"', "structured_outputs must be a table"),
        ('{"regexp": "a"}', "Unknown name 'regexp' in structured_outputs; known are json, regex"),
        ('{"regex": null}', "needs exactly one of"),
    ],
)
def test_a_workload_line_with_bad_structured_outputs_is_refused(value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_workload([f'{{"prompt": "x", "sampling_params": {{"structured_outputs": {value}}}}}'])


# The mask of a row


def words(*token_ids: int, vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def test_bit_t_mod_32_of_word_t_div_32_is_token_t() -> None:
    assert np.flatnonzero(unpack_bitmask(np.array([1 << 5, -(2**31)], np.int32), 64)).tolist() == [5, 63]
    assert unpack_bitmask(np.array([-1, -1], np.int32), 33).tolist() == [True] * 33


def test_the_mask_comes_first_and_no_bias_or_allowed_id_brings_a_token_back() -> None:
    row = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    params = SamplingParams(allowed_token_ids=[1, 3], logit_bias={3: 50, 1: -1, 2: 50}, presence_penalty=1.0)
    processed = process_logits(row, params, (), (1,), words(0, 1, 2, vocab_size=4))
    assert processed.tolist() == [-np.inf, 0.0, -np.inf, -np.inf]
    assert row.tolist() == [1.0, 2.0, 3.0, 4.0]


def masked_sample(
    tier_name: str, logits: np.ndarray, bitmasks: dict[int, np.ndarray], **options: Any
) -> list[int]:
    """The tier's sampler on rows of which some have a mask."""
    sampler = TierSampler(tier_name)
    with pytest.MonkeyPatch.context() as patch:
        plain = sampler.module.SamplingMetadata
        patch.setattr(
            sampler.module,
            "SamplingMetadata",
            lambda **columns: plain(**columns, bitmasks=bitmasks),
            raising=True,
        )
        return sampler(logits, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_sampler_masks_each_row_by_its_own_mask(tier_name: str, temperature: float) -> None:
    logits = random_logits(6, 70)
    choices = {0: {3, 69}, 2: {31}, 3: {32, 33, 64}}
    bitmasks = {r: words(*ids, vocab_size=70) for r, ids in choices.items()}
    tokens = masked_sample(tier_name, logits, bitmasks, temperature=temperature, seed=range(6))
    by_hand = np.where(
        [[r not in choices or t in choices[r] for t in range(70)] for r in range(6)], logits, -np.inf
    )
    assert tokens == TierSampler(tier_name)(by_hand, temperature=temperature, seed=range(6))
    assert all(tokens[r] in ids for r, ids in choices.items())


def test_a_mask_without_a_token_ends_its_row_alone_and_hides_no_nan(tier_name: str) -> None:
    logits = random_logits(3, 40)
    logits[2, 5] = np.nan
    nothing = np.zeros(2, dtype=np.int32)
    tokens = masked_sample(tier_name, logits, {0: nothing, 2: nothing}, temperature=0.0)
    assert tokens == [-2, int(logits[1].argmax()), -1]


# What a grammar allows


def test_a_token_is_allowed_if_it_leads_towards_one_of_the_choices(compiler: GrammarCompiler) -> None:
    choices = ["teeth", "tea", "other"]
    grammar, text = compile_one(compiler, choice=choices), ""
    for token_id in ids("teeth"):
        by_hand = {
            t
            for t in range(2, VOCAB_SIZE)
            if any(c.startswith(text + byte_tokenizer().decode([t])) for c in choices)
        }
        assert allowed(grammar) == by_hand
        grammar.accept(token_id)
        text += byte_tokenizer().decode([token_id])
    assert allowed(grammar) == {EOS}


@pytest.mark.parametrize("params", EXAMPLES)
@pytest.mark.parametrize("seed", range(8))
def test_masks_behind_drafts_are_those_of_the_output_and_change_nothing(
    compiler: GrammarCompiler, params: dict[str, Any], seed: int
) -> None:
    """A random walk; at each token a copy goes on for up to five tokens, end of sequence included."""
    rng = np.random.default_rng(seed)
    grammar = compile_one(compiler, **params)
    for _ in range(25):
        before = grammar.bitmask(())
        twin, drafts, rows = grammar.fork(), [], [before[0]]
        for _ in range(rng.integers(0, 6)):
            drafts.append(int(rng.choice(sorted(allowed(twin)))))
            twin.accept(drafts[-1])
            rows.append(twin.bitmask(())[0])
        np.testing.assert_array_equal(grammar.bitmask(drafts), np.stack(rows))
        ended = drafts.index(EOS) + 1 if EOS in drafts else len(drafts)
        assert ended <= grammar.count_valid(drafts) <= len(drafts)
        forbidden = next(t for t in range(VOCAB_SIZE) if t not in allowed(twin))
        assert grammar.count_valid([*drafts[:ended], forbidden]) == ended or EOS in drafts
        np.testing.assert_array_equal(grammar.bitmask(()), before)
        grammar.accept(int(rng.choice(sorted(allowed(grammar)))))


def test_a_fork_goes_its_own_way(compiler: GrammarCompiler) -> None:
    grammar = compile_one(compiler, choice=["ab", "xyz"])
    fork = grammar.fork()
    accept(grammar, ids("a"))
    accept(fork, ids("x"))
    assert (allowed(grammar), allowed(fork)) == (set(ids("b")), set(ids("y")))


def test_a_compiled_grammar_is_remembered_but_each_request_starts_anew(compiler: GrammarCompiler) -> None:
    first = compile_one(compiler, regex="[0-3]x")
    misses = compiler._compiled.cache_info().misses
    start = allowed(first)
    accept(first, ids("1"))
    assert allowed(compile_one(compiler, regex="[0-3]x")) == start
    assert compiler._compiled.cache_info().misses == misses


def test_special_tokens_are_no_text(compiler: GrammarCompiler) -> None:
    assert allowed(compile_one(compiler, regex="(?s:.*)")) & {0, EOS} == {EOS}


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 10, VOCAB_SIZE + 1, VOCAB_SIZE + 100])
def test_a_vocabulary_of_another_size_than_the_tokenizers_has_masks_of_its_own_size(vocab_size: int) -> None:
    compiler = GrammarCompiler(replace(MODEL, vocab_size=vocab_size), byte_tokenizer())
    bitmask = compile_one(compiler, regex="(?s:.*)").bitmask(())
    assert (bitmask.shape, bitmask.dtype) == ((1, -(-vocab_size // 32)), np.int32)
    tokens = unpack_bitmask(bitmask[0], vocab_size)
    assert tokens[EOS]
    assert tokens[min(vocab_size, VOCAB_SIZE) - 1]
    assert not tokens[VOCAB_SIZE:].any()


# The end of a text


def test_every_end_of_sequence_id_is_allowed_where_the_text_may_end_and_alone_where_it_must() -> None:
    compiler = GrammarCompiler(replace(MODEL, eos_token_ids=(EOS, 300)), byte_tokenizer())
    grammar = compile_one(compiler, regex="ab?")
    assert not allowed(grammar) & {EOS, 300}
    accept(grammar, ids("a"))
    assert allowed(grammar) == {EOS, 300, *ids("b")}
    accept(grammar, ids("b"))
    assert allowed(grammar) == {EOS, 300}


def test_behind_the_end_nothing_but_end_of_sequence_is_allowed(compiler: GrammarCompiler) -> None:
    """So an output that ignores end-of-sequence is still what was asked for."""
    for params in ({"regex": "a*"}, {"regex": "aa"}):
        grammar = accept(compile_one(compiler, **params), [*ids("a"), *ids("a")])
        assert grammar.count_valid([EOS]) == 1
        grammar = accept(grammar, [EOS, EOS])
        assert allowed(grammar) == {EOS}
        assert allowed(grammar, [EOS, EOS, EOS]) == {EOS}
        assert grammar.count_valid([EOS, EOS, *ids("a")]) == 2


def test_a_token_that_the_grammar_forbids_leaves_nothing_to_go_on_with(compiler: GrammarCompiler) -> None:
    grammar = accept(compile_one(compiler, regex="abc"), ids("x"))
    assert allowed(grammar) == set()
    assert grammar.count_valid(ids("b")) == 0
    assert allowed(accept(grammar, [EOS])) == set()


# What a request makes of its grammar


def with_grammar(compiler: GrammarCompiler, request: Request, **params: Any) -> Request:
    request.grammar = compile_one(compiler, **params)
    return request


def test_drafts_are_cut_before_the_first_that_the_grammar_forbids(compiler: GrammarCompiler) -> None:
    request = with_grammar(compiler, make_request("a", 4), regex="abcd")
    append_and_check_stop(request, ids("a")[0], max_total_tokens=100)
    request.take_drafts(ids("bcx"), max_total_tokens=100)
    assert request.spec_token_ids == ids("bc")
    request.take_drafts(ids("x"), max_total_tokens=100)
    assert request.spec_token_ids == []


def test_a_scheduler_sends_a_mask_a_row_where_a_request_samples_and_none_in_mid_prefill(
    tier: Tier, compiler: GrammarCompiler
) -> None:
    text = ids("0123456789")
    config = replace(make_config(max_num_batched_tokens=4), speculative=SpeculativeConfig("ngram", 3))
    driver = Driver(
        tier,
        config,
        token_of=lambda request: text[request.num_output_tokens % 10],
        drafts_of=lambda request, next_tokens: list(next_tokens),
    )
    driver.add(with_grammar(compiler, make_request("a", 6, max_tokens=10), regex="[0-9]{10}"))
    walked = compile_one(compiler, regex="[0-9]{10}")
    num_rows: list[list[int]] = []
    while driver.scheduler.has_unfinished_requests():
        done = len(driver.outputs["a"])
        schedule = driver.step()
        for bitmask in schedule.grammar_bitmasks.values():
            drafts = schedule.scheduled_spec_decode_tokens.get("a", ())
            np.testing.assert_array_equal(bitmask, accept(walked.fork(), text[:done]).bitmask(drafts))
        num_rows.append([len(bitmask) for bitmask in schedule.grammar_bitmasks.values()])
    assert driver.outputs["a"] == text
    assert num_rows == [
        [],
        [1],
        [4],
        [4],
        [1],
    ]  # four of six prompt tokens; the prompt; with drafts; the last token


# What is refused


def refusal(**params: Any) -> str:
    processor = InputProcessor(make_scripted_config(max_model_len=100), byte_tokenizer())
    kinds = {name: params.pop(name) for name in KINDS if name in params}
    sampling = SamplingParams(structured_outputs=StructuredOutputsParams(**kinds), **params)
    with pytest.raises(ValueError, match=r"^[^\n]+\.$") as caught:
        processor.process("a", "x", sampling, arrival_number=0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"regex": "[unclosed"}, "regex cannot be compiled: .*unclosed character class"),
        ({"regex": "(?=a)b"}, "regex cannot be compiled: .*look-around"),
        ({"regex": r"[^\s\S]"}, "regex accepts no text at all"),
        ({"json": {"type": "thing"}}, "json cannot be compiled: Invalid type: thing"),
        ({"json": {"type": "array", "uniqueItems": True}}, r"json cannot be compiled: Unimplemented keys: "),
        (
            {"json": {"$ref": "https://example.com/schema"}},
            "json cannot be compiled: .*does not fetch resources",
        ),
        (
            {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
            "json cannot be compiled: Unsatisfiable schema",
        ),
        ({"grammar": "start: ("}, "grammar cannot be compiled: .*Expected token"),
        ({"grammar": 'rule: "x"'}, "grammar cannot be compiled: "),
        ({"grammar": "root ::= ("}, "grammar cannot be compiled: Failed to convert the grammar from GBNF"),
        ({"choice": ["a"] * 120_000}, "choice cannot be compiled: .*too big"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, "regex has 262145 characters; 262144 are the limit"),
        (
            {"regex": "a|b", "allowed_token_ids": [0, 1]},
            "structured_outputs, allowed_token_ids, .* leave no token",
        ),
        ({"regex": "a?", "min_tokens": 1, "allowed_token_ids": [1]}, "leave no token to generate"),
    ],
)
def test_a_grammar_that_cannot_work_is_refused_at_submission(params: dict[str, Any], message: str) -> None:
    assert re.search(message, refusal(**params))


def test_a_model_without_an_end_of_sequence_token_is_refused() -> None:
    compiler = GrammarCompiler(replace(MODEL, eos_token_ids=()), byte_tokenizer())
    with pytest.raises(
        ValueError, match="needs a model with an end-of-sequence token, and this one has none"
    ):
        compile_one(compiler, regex="a")


def test_without_the_package_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert refusal(regex="a") == (
        "structured_outputs needs the package llguidance; install it with `pip install 'twinfer[guided]'`."
    )


def test_a_tokenizer_that_the_library_does_not_know_is_refused() -> None:
    class Unknown:
        vocab_size = VOCAB_SIZE

        def to_json(self) -> str:
            return "{}"

    compiler = GrammarCompiler(MODEL, Unknown())  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"cannot be used with this model's tokenizer \(error loading tokenizer"
    ):
        compile_one(compiler, regex="a")


def test_an_engine_core_without_a_compiler_refuses_instead_of_generating_freely(tier: Tier) -> None:
    config = make_scripted_config(max_model_len=100)
    core = EngineCore(config, ScriptedTier(tier), NO_WEIGHTS)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    request, _ = InputProcessor(config, byte_tokenizer()).process("a", "x", params, arrival_number=0)
    with pytest.raises(ValueError, match="has no compiler for structured_outputs"):
        core.add_request(request)
    assert not core.has_unfinished_requests()
