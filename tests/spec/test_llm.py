"""Text in, text out: `LLMEngine` a step at a time, `LLM` a batch at a time, both on a scripted model."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reference.contracts.noise import derive_seed
from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.llm import LLM
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.logger import LEVEL_VARIABLE, configure_logging, logger
from reference.frontend.outputs import RequestOutput
from tests.scripted import (
    EOS,
    VOCAB_SIZE,
    ScriptedRunner,
    ScriptedTier,
    byte_tokenizer,
    make_engine,
    make_scripted_config,
)
from tests.tiny_models import make_tiny_llama

MakeLLM = Callable[..., tuple[LLM, ScriptedRunner]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_llama(
        folder, vocab_size=VOCAB_SIZE, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1
    )


@pytest.fixture
def make_llm(tier: Tier, model_folder: Path) -> MakeLLM:
    def make(script: dict[str, list[int]] | None = None, **options: Any) -> tuple[LLM, ScriptedRunner]:
        runner_options = {name: options.pop(name) for name in ("raise_at", "nan_at") if name in options}
        scripted = ScriptedTier(tier, script=script or {}, **runner_options)
        llm = LLM(scripted, model_folder, **options)
        assert scripted.runner is not None
        return llm, scripted.runner

    return make


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(1000):
        if not engine.has_unfinished_requests():
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.engine_core.scheduler.check_integrity()
    raise AssertionError("the engine does not come to an end")


def assert_idle(engine: LLMEngine) -> None:
    """Nothing of any request is left, in the front end or in the core."""
    assert not engine.has_unfinished_requests()
    assert engine.output_processor.states == {}
    scheduler = engine.engine_core.scheduler
    scheduler.check_integrity()
    assert scheduler.requests == {}
    assert scheduler.snapshot().cache.ref_counts == {}


def ids(text: str) -> list[int]:
    return byte_tokenizer().encode(text)


# LLMEngine


def test_the_engine_streams_deltas_that_add_up_to_the_text(tier: Tier) -> None:
    engine, _ = make_engine(tier, script={"a": ids("Hello, world")})
    engine.add_request("a", "say hello", SamplingParams(max_tokens=len(ids("Hello, world")), stop="never"))
    outputs = run(engine)["a"]
    assert (
        "".join(output.outputs[0].delta_text for output in outputs)
        == outputs[-1].outputs[0].text
        == "Hello, world"
    )
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert_idle(engine)


def test_a_stop_string_ends_the_request_in_the_core_too(tier: Tier) -> None:
    engine, runner = make_engine(tier, script={"a": ids("one. two. three")})
    engine.add_request("a", "count", SamplingParams(max_tokens=100, stop=". t"))
    output = run(engine)["a"][-1]
    assert output.outputs[0].text == "one"
    assert output.outputs[0].token_ids == ids("one. t")
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", ". t")
    assert len(runner.schedules) == len(ids("one. t")), "not one step more than needed"
    assert_idle(engine)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("params", "length", "reason"),
    [
        ({"stop": "cde", "max_tokens": 20}, 5, "stop"),
        ({"max_tokens": 6}, 6, "length"),
        ({"max_tokens": 20}, 9, "stop"),  # the end-of-sequence token, the ninth
    ],
    ids=["stop string", "max_tokens", "end of sequence"],
)
def test_b33_a_stop_inside_the_tokens_of_one_step_cuts_the_rest(
    tier: Tier, include: bool, params: dict[str, Any], length: int, reason: str
) -> None:
    script = [*ids("abcdefgh"), EOS, *ids("more")]
    results = []
    for num_drafts in (0, 3):
        engine, _ = make_engine(tier, script={"a": script}, num_drafts=num_drafts)
        engine.add_request("a", "alphabet", SamplingParams(include_stop_str_in_output=include, **params))
        output = run(engine)["a"][-1]
        assert_idle(engine)
        results.append((output.outputs[0].text, output.outputs[0].token_ids, output.outputs[0].finish_reason))
        assert output.metrics.num_output_tokens == length
    assert results[0] == results[1]
    assert results[0][1:] == (script[:length], reason)


def test_5543_a_batch_that_ended_on_stop_strings_leaves_later_outputs_as_they_would_be(tier: Tier) -> None:
    params = SamplingParams(max_tokens=12)
    cold, runner = make_engine(tier)
    cold.add_request("late", "the same prompt for all", params)
    expected = run(cold)["late"][-1].outputs[0].token_ids
    assert expected == runner.tokens("late", 12)

    engine, _ = make_engine(tier, script={name: ids("stop here and not there") for name in "abc"})
    for name, stop in zip("abc", ("here", "st", "not"), strict=True):
        engine.add_request(name, "the same prompt for all", SamplingParams(max_tokens=50, stop=stop))
    assert {items[-1].outputs[0].finish_reason for items in run(engine).values()} == {"stop"}
    engine.add_request("late", "the same prompt for all", params)
    output = run(engine)["late"][-1]
    assert output.outputs[0].token_ids == expected
    assert output.num_cached_tokens > 0, "it does read what the batch left behind"


def test_a_refused_request_is_not_queued_and_changes_no_later_seed(tier: Tier) -> None:
    engine, runner = make_engine(tier, make_scripted_config(num_usable_blocks=4, block_size=4, seed=5))
    engine.add_request("a", [9], SamplingParams(max_tokens=1))
    for request_id, prompt in (("a", [9]), ("b", []), ("b", [VOCAB_SIZE]), ("b", [9] * 17)):
        with pytest.raises(ValueError, match=r"already|empty|outside|needs 5 KV cache blocks"):
            engine.add_request(request_id, prompt, SamplingParams())
    engine.add_request("b", [9, 9], SamplingParams(max_tokens=1))
    assert sorted(run(engine)) == ["a", "b"]
    seeds = {new.request_id: new.seed for schedule in runner.schedules for new in schedule.scheduled_new_reqs}
    assert seeds == {"a": derive_seed(5, 0), "b": derive_seed(5, 1)}
    assert_idle(engine)


def test_b17_an_abort_while_the_last_step_runs_commits_nothing(tier: Tier) -> None:
    last: list[RequestOutput] = []
    engine, _ = make_engine(tier, on_step=lambda schedule, output: last.extend(engine.abort_request("a")))
    engine.add_request("a", "prompt", SamplingParams(max_tokens=1))
    assert engine.step() == []
    (output,) = last
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])
    assert_idle(engine)


def test_aborting_one_request_leaves_the_others_token_counts_exact(tier: Tier) -> None:
    engine, runner = make_engine(tier)
    for name in "abcd":
        engine.add_request(name, name * 5, SamplingParams(max_tokens=6))
    engine.step()
    engine.step()
    aborted = engine.abort_request(["b", "d", "unknown"])
    assert [len(output.outputs[0].token_ids) for output in aborted] == [2, 2]
    outputs = run(engine)
    assert sorted(outputs) == ["a", "c"]
    for name, items in outputs.items():
        assert items[-1].outputs[0].token_ids == runner.tokens(name, 6)
    assert_idle(engine)


def test_preemption_is_counted_and_changes_no_token(tier: Tier) -> None:
    """The forced-preemption recipe: two requests of 34 + 35 tokens in a pool of 7 blocks of 16."""
    for num_blocks, preempts in ((7, True), (11, False)):
        engine, runner = make_engine(tier, make_scripted_config(num_usable_blocks=num_blocks, block_size=16))
        for name in "ab":
            engine.add_request(name, [ord(name)] * 34, SamplingParams(max_tokens=35, ignore_eos=True))
        last = {name: items[-1] for name, items in run(engine).items()}
        assert (sum(output.metrics.num_preemptions for output in last.values()) > 0) == preempts
        for name, output in last.items():
            assert output.outputs[0].token_ids == runner.tokens(name, 35)
        assert_idle(engine)


# LLM


def test_outputs_come_in_the_order_of_the_prompts(make_llm: MakeLLM) -> None:
    llm, runner = make_llm(max_num_seqs=2)
    lengths = [9, 1, 5, 3]
    outputs = llm.generate(
        ["first", "second", "third", "fourth"],
        [SamplingParams(max_tokens=n) for n in lengths],
        use_tqdm=False,
    )
    assert [output.prompt for output in outputs] == ["first", "second", "third", "fourth"]
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    for output in outputs:
        assert output.finished
        assert output.outputs[0].token_ids == runner.tokens(
            output.request_id, len(output.outputs[0].token_ids)
        )
        assert output.outputs[0].text == byte_tokenizer().decode(output.outputs[0].token_ids)
    assert_idle(llm.llm_engine)


@pytest.mark.parametrize(
    "prompts", ["hi", ids("hi"), ["hi"], [ids("hi")], {"prompt": "hi"}, [{"prompt_token_ids": ids("hi")}]]
)
def test_a_prompt_may_be_text_ids_or_a_dict_alone_or_in_a_list(make_llm: MakeLLM, prompts: Any) -> None:
    llm, runner = make_llm()
    (output,) = llm.generate(prompts, use_tqdm=False)
    assert output.prompt_token_ids == ids("hi")
    assert output.outputs[0].token_ids == runner.tokens("0", 16), "max_tokens is 16 unless given"


def test_no_prompts_give_no_outputs(make_llm: MakeLLM) -> None:
    assert make_llm()[0].generate([], use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompts", "params", "match"),
    [
        (["good", "", "good"], None, "empty"),
        (["good", [5, VOCAB_SIZE]], None, "outside the vocabulary"),
        (["good", "x" * 600], None, "max_model_len is 512"),
        (["good", 5.0], None, "float"),
        ([5, 6.5], None, "6.5"),
        (["good", 5], None, "int"),
        (5, None, "list of prompts"),
        (["good", "good"], [SamplingParams()], "2 prompts and 1 sampling_params"),
        (["good"], {"temperature": 0}, "sampling_params must be"),
        (["good"], [{"temperature": 0}], "SamplingParams"),
        (["good", "good"], [SamplingParams(), SamplingParams(stop_token_ids=[VOCAB_SIZE])], "stop_token_ids"),
    ],
)
def test_one_bad_prompt_or_parameter_leaves_nothing_queued(
    make_llm: MakeLLM, prompts: Any, params: Any, match: str
) -> None:
    llm, runner = make_llm()
    with pytest.raises(ValueError, match=match):
        llm.generate(prompts, params, use_tqdm=False)
    assert_idle(llm.llm_engine)
    assert runner.schedules == []
    (output,) = llm.generate("good", SamplingParams(max_tokens=3), use_tqdm=False)
    assert output.outputs[0].token_ids == runner.tokens(output.request_id, 3)


def test_b51_lengths_at_the_border_of_max_model_len(make_llm: MakeLLM) -> None:
    llm, _ = make_llm(max_model_len=128)
    for num_prompt, max_tokens, expected in (
        (127, 1, 1),
        (100, 29, 28),
        (100, None, 28),
        (8, 121, 120),
        (8, 120, 120),
    ):
        (output,) = llm.generate([5] * num_prompt, SamplingParams(max_tokens=max_tokens), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == expected
        assert output.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError, match=r"128 tokens.* max_model_len is 128"):
        llm.generate([5] * 128, SamplingParams(max_tokens=1), use_tqdm=False)


def test_b37_a_character_cut_by_max_tokens_is_one_replacement_character_streamed_or_not(
    make_llm: MakeLLM,
) -> None:
    emoji = ids("\U0001f60a")
    assert len(emoji) == 4
    llm, _ = make_llm({"0": emoji, "stream": emoji})
    (output,) = llm.generate("smile", SamplingParams(max_tokens=1), use_tqdm=False)
    llm.llm_engine.add_request("stream", "smile", SamplingParams(max_tokens=1))
    streamed = "".join(step.outputs[0].delta_text for step in run(llm.llm_engine)["stream"])
    assert output.outputs[0].text == streamed == "\ufffd"
    assert output.outputs[0].finish_reason == "length"


def test_a_whole_cached_prompt_still_computes_one_token(make_llm: MakeLLM) -> None:
    llm, _ = make_llm(block_size=16)
    for num_prompt, cached in ((16, 0), (32, 16), (33, 32), (48, 32)):
        prompt = [5 + num_prompt] * num_prompt
        first, second = (
            llm.generate(prompt, SamplingParams(max_tokens=4), use_tqdm=False)[0] for _ in range(2)
        )
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, use_tqdm=False)[0].num_cached_tokens == 0


def test_only_requests_of_one_salt_share_blocks(make_llm: MakeLLM) -> None:
    llm, _ = make_llm(block_size=4)

    def cached(salt: str | None) -> int:
        prompt = {"prompt_token_ids": [7] * 13, "cache_salt": salt}
        return llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)[0].num_cached_tokens

    assert [cached("a"), cached("b"), cached(None), cached("a"), cached(None)] == [0, 0, 0, 12, 12]


def test_ctrl_c_ends_all_requests_of_the_call_and_the_llm_stays_usable(make_llm: MakeLLM) -> None:
    for step in (0, 2):
        llm, runner = make_llm(block_size=4, max_num_seqs=2, raise_at={step: KeyboardInterrupt()})
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5] * 9, [6] * 9, [7] * 9], SamplingParams(max_tokens=5), use_tqdm=False)
        assert_idle(llm.llm_engine)
        # The runner asserts that no block is found that the interrupted step should have computed.
        outputs = llm.generate([[5] * 9, [6] * 9, [7] * 9], SamplingParams(max_tokens=5), use_tqdm=False)
        for output in outputs:
            assert output.outputs[0].token_ids == runner.tokens(output.request_id, 5)


def test_an_error_is_an_output_with_its_reason_and_ends_nobody_else(make_llm: MakeLLM) -> None:
    llm, runner = make_llm(nan_at={"1": 1})
    good, bad, other = llm.generate(["x", "y", "z"], SamplingParams(max_tokens=4), use_tqdm=False)
    assert (bad.outputs[0].finish_reason, bad.error) == ("error", "logits are not a number")
    assert bad.outputs[0].token_ids == runner.tokens("1", 1)
    assert [len(output.outputs[0].token_ids) for output in (good, other)] == [4, 4]


def test_chat_applies_the_template_to_one_conversation_or_to_several(make_llm: MakeLLM) -> None:
    llm, runner = make_llm()
    tokenizer = llm.get_tokenizer()
    hello, bye = ([{"role": "user", "content": text}] for text in ("hello", "bye"))
    for messages, conversations in ((hello, [hello]), ([hello, bye], [hello, bye])):
        outputs = llm.chat(messages, SamplingParams(max_tokens=2), use_tqdm=False)
        assert [output.prompt for output in outputs] == [
            tokenizer.apply_chat_template(c) for c in conversations
        ]
        assert [output.prompt_token_ids for output in outputs] == [
            tokenizer.encode_chat(c) for c in conversations
        ]
        assert [output.outputs[0].token_ids for output in outputs] == [
            runner.tokens(output.request_id, 2) for output in outputs
        ]


@pytest.mark.parametrize(
    "messages", [[], "hello", {"role": "user", "content": "x"}, ["hello"], [{"role": "user"}], [[]], None]
)
def test_malformed_messages_are_refused(make_llm: MakeLLM, messages: Any) -> None:
    llm, _ = make_llm()
    with pytest.raises(ValueError, match="message"):
        llm.chat(messages, use_tqdm=False)
    assert_idle(llm.llm_engine)


def test_metrics_go_on_over_calls_and_the_hit_rate_begins_anew_with_the_cache(make_llm: MakeLLM) -> None:
    llm, _ = make_llm(block_size=16)
    for _ in range(2):
        llm.generate([5] * 33, SamplingParams(max_tokens=2), use_tqdm=False)
    assert llm.get_metrics().prefix_cache_hit_rate == 32 / 66
    assert llm.reset_prefix_cache()
    metrics = llm.get_metrics()
    assert (metrics.prefix_cache_hits, metrics.prefix_cache_hit_rate) == (32, 0.0)
    assert metrics.generation_tokens == metrics.inter_token_latency.count * 2 == 4


def test_a_line_of_the_log_goes_above_the_bar_and_to_an_applications_own_handlers_once(
    make_llm: MakeLLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for handlers in ([logging.StreamHandler(sys.stderr)], []):
        records: list[logging.LogRecord] = []
        own = logging.Handler()
        own.emit = records.append  # type: ignore[method-assign]
        llm, _ = make_llm()
        monkeypatch.setattr(logger, "handlers", handlers)
        monkeypatch.setattr(logging.getLogger(), "handlers", [own])
        capsys.readouterr()
        monkeypatch.setattr("reference.frontend.metrics.LOG_INTERVAL_S", 0.0)
        llm.generate([5] * 4, SamplingParams(max_tokens=1))
        printed = capsys.readouterr().err
        assert [record.getMessage()[:6] for record in records] == ["Prompt"]
        lines = [line for line in printed.replace("\r", "\n").split("\n") if "running 0 requests" in line]
        assert len(lines) == len(handlers)
        assert all(line.startswith("Prompt") for line in lines), "a line of its own"


def test_the_progress_bar_counts_prompts_and_tokens_a_second(
    make_llm: MakeLLM, capsys: pytest.CaptureFixture[str]
) -> None:
    llm, _ = make_llm()
    capsys.readouterr()
    llm.generate(["a", "b", "c"], use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b", "c"])
    bar = capsys.readouterr().err
    assert "3/3" in bar
    assert "tok/s" in bar


def test_an_unknown_option_is_named_with_the_known_ones(tier: Tier) -> None:
    with pytest.raises(ValueError, match=r"'max_seqs'.*max_num_seqs"):
        LLM(tier, "anything", max_seqs=3)


def test_a_tier_that_cannot_run_here_says_why_before_anything_is_loaded(
    tier: Tier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scripted = ScriptedTier(tier)
    monkeypatch.setattr(scripted, "why_unavailable", lambda: "A part is missing: run `make`.")
    with pytest.raises(ValueError, match="A part is missing"):
        LLM(scripted, tmp_path / "nothing-here")


def test_an_unknown_model_is_one_sentence(tier: Tier, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing-here"):
        LLM(tier, tmp_path / "nothing-here")


@pytest.fixture
def own_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The engine's logger as a new process has it, with no level asked for; afterwards as it was."""
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    logger = logging.getLogger("twinfer")
    level, handlers = logger.level, list(logger.handlers)
    logger.handlers.clear()
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_the_startup_line_is_logged_at_info(
    make_llm: MakeLLM, caplog: pytest.LogCaptureFixture, own_logger: logging.Logger
) -> None:
    make_llm(num_blocks=11, max_model_len=64)
    assert "10 blocks of 16 tokens = 160 tokens" in caplog.text
    assert "2.50 requests of 64 tokens" in caplog.text


@pytest.mark.parametrize("level", ["DEBUG", "info", "WARNING"])
def test_the_log_level_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, own_logger: logging.Logger, level: str
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, level)
    monkeypatch.setattr(own_logger, "propagate", False)  # no application's handler above it
    configure_logging()
    configure_logging()
    assert own_logger.level == getattr(logging, level.upper())
    assert len(own_logger.handlers) == 1


def test_an_applications_own_log_handlers_are_left_alone(
    caplog: pytest.LogCaptureFixture, own_logger: logging.Logger
) -> None:
    configure_logging()
    assert own_logger.handlers == [], "pytest's handler, above it, already gets every record"


def test_an_unknown_log_level_is_refused(monkeypatch: pytest.MonkeyPatch, own_logger: logging.Logger) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "LOUD")
    with pytest.raises(ValueError, match=r"TWINFER_LOGGING_LEVEL.*'LOUD'"):
        configure_logging()
