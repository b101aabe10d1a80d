"""The engine core's news become outputs: cumulative text and ids, deltas, reasons, metrics."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest

from reference.contracts.request import EngineCoreRequest
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import EngineCoreOutput
from reference.frontend.output_processor import OutputProcessor
from reference.frontend.outputs import RequestOutput
from reference.frontend.tokenizer import Tokenizer
from tests.scripted import PieceTokenizer

PIECES = ("ab", "cd", "ST", "OP", ".")


def make_processor(*request_ids: str, **params: Any) -> OutputProcessor:
    processor = OutputProcessor(cast(Tokenizer, PieceTokenizer(*PIECES)))
    for request_id in request_ids:
        request = EngineCoreRequest(request_id, (4, 4, 4), SamplingParams(**params), seed=0, arrival=(0, 0))
        processor.add_request(request, "...")
    return processor


def news(request_id: str, *token_ids: int, **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, token_ids, **fields)


def process_one(processor: OutputProcessor, item: EngineCoreOutput) -> tuple[RequestOutput, list[str]]:
    (output,), to_abort = processor.process_outputs([item])
    return output, to_abort


def test_outputs_are_cumulative_and_carry_what_is_new_beside_it() -> None:
    processor = make_processor("a")
    first, _ = process_one(processor, news("a", 0))
    last, to_abort = process_one(processor, news("a", 1, 4, finish_reason="length"))
    assert (first.outputs[0].text, first.outputs[0].token_ids, first.finished) == ("ab", [0], False)
    assert (last.outputs[0].text, last.outputs[0].token_ids, last.finished) == ("abcd.", [0, 1, 4], True)
    assert [output.outputs[0].delta_text for output in (first, last)] == ["ab", "cd."]
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("a", "...", [4, 4, 4])
    assert last.outputs[0].finish_reason == "length"
    assert to_abort == []


def test_53_only_the_last_output_is_finished_and_the_deltas_are_the_text() -> None:
    processor = make_processor("a", stop="STOP")
    outputs = [
        process_one(processor, news("a", token_id, finish_reason="length" if token_id == 4 else None))[0]
        for token_id in (0, 1, 2, 4)
    ]
    assert [output.finished for output in outputs] == [False, False, False, True]
    assert (
        "".join(output.outputs[0].delta_text for output in outputs)
        == outputs[-1].outputs[0].text
        == "abcdST."
    )
    for output, following in pairwise(outputs):
        assert following.outputs[0].text == output.outputs[0].text + following.outputs[0].delta_text


def test_an_output_that_was_handed_out_does_not_change_afterwards() -> None:
    processor = make_processor("a")
    first, _ = process_one(processor, news("a", 0, num_preemptions=0))
    process_one(processor, news("a", 1, num_preemptions=3, finish_reason="stop"))
    assert first.outputs[0].token_ids == [0]
    assert (first.metrics.num_output_tokens, first.metrics.num_preemptions) == (1, 0)


def test_55_a_stop_string_ends_the_request_and_the_engine_is_told_to_abort_it() -> None:
    processor = make_processor("a", "b", stop="STOP")
    outputs, to_abort = processor.process_outputs([news("a", 0, 2, 3, 1), news("b", 0)])
    assert to_abort == ["a"]
    stopped = outputs[0].outputs[0]
    assert (stopped.text, stopped.token_ids) == ("ab", [0, 2, 3])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "STOP")
    assert not outputs[1].finished
    assert processor.process_outputs([news("a", 1)]) == ([], []), "no output after the stop"


def test_a_stop_string_in_the_very_last_tokens_needs_no_abort() -> None:
    output, to_abort = process_one(
        make_processor("a", stop="STOP"), news("a", 2, 3, 4, finish_reason="length")
    )
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "STOP")
    assert output.outputs[0].token_ids == [2, 3]
    assert output.metrics.num_output_tokens == 2
    assert to_abort == []


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab.")])
def test_56_a_stop_token_is_in_the_ids_and_in_the_text_only_by_flag(include: bool, text: str) -> None:
    processor = make_processor("a", include_stop_str_in_output=include, stop_token_ids=[4])
    output, _ = process_one(processor, news("a", 0, 4, finish_reason="stop", stop_reason=4))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == (text, [0, 4])
    assert output.outputs[0].stop_reason == 4


def test_58_an_aborted_request_gets_its_last_output_and_leaves_nothing_behind() -> None:
    processor = make_processor("a", "b", stop="STOP")
    processor.process_outputs([news("a", 0, 2), news("b", 1)])
    (output,) = processor.abort_requests(["a", "unknown"])
    assert (output.outputs[0].finish_reason, output.finished) == ("abort", True)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("abST", [0, 2])
    assert processor.process_outputs([news("a", 3)]) == ([], [])
    assert list(processor.states) == ["b"]
    assert processor.abort_requests(["a"]) == []


def test_an_error_keeps_the_tokens_so_far_and_says_why() -> None:
    processor = make_processor("a")
    process_one(processor, news("a", 0))
    output, _ = process_one(processor, news("a", finish_reason="error", error="it broke"))
    assert (output.outputs[0].finish_reason, output.error) == ("error", "it broke")
    assert output.outputs[0].text == "ab"
    assert processor.states == {}


def test_metrics_count_tokens_hits_preemptions_and_times() -> None:
    processor = make_processor("a")
    first, _ = process_one(processor, news("a", 0, num_cached_tokens=2, num_preemptions=0))
    last, _ = process_one(
        processor, news("a", 1, 4, num_cached_tokens=2, num_preemptions=1, finish_reason="length")
    )
    metrics = last.metrics
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens) == (3, 3)
    assert (metrics.num_cached_tokens, metrics.num_preemptions) == (2, 1)
    assert last.num_cached_tokens == 2
    assert metrics.ttft_s == first.metrics.ttft_s
    assert metrics.ttft_s is not None
    assert metrics.latency_s is not None
    assert 0 <= metrics.ttft_s <= metrics.latency_s


def test_a_request_that_ends_before_its_first_token_has_no_time_to_it() -> None:
    processor = make_processor("a")
    (output,) = processor.abort_requests(["a"])
    assert output.metrics.ttft_s is None
    assert output.metrics.latency_s is not None
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [])
