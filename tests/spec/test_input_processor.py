"""What reaches the engine core is tokenized, in range and seeded; everything else is refused with one sentence."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import pytest

from reference.contracts.request import EngineCoreRequest
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.input_processor import InputProcessor
from tests.scripted import EOS, VOCAB_SIZE, byte_tokenizer, make_scripted_config


def process(prompt: Any, *, max_model_len: int = 100, **options: Any) -> tuple[EngineCoreRequest, str | None]:
    processor = InputProcessor(make_scripted_config(max_model_len=max_model_len, seed=7), byte_tokenizer())
    params = options.pop("params", SamplingParams())
    options.setdefault("arrival_number", 0)
    return processor.process("a", prompt, params, **options)


def refusal(prompt: Any, **options: Any) -> str:
    with pytest.raises(ValueError, match=r"^[^\n]+\.$") as caught:
        process(prompt, **options)
    return str(caught.value)


def test_text_is_tokenized_and_kept() -> None:
    for prompt in ("hello", {"prompt": "hello"}, {"prompt": "hello", "prompt_token_ids": None}):
        request, text = process(prompt)
        assert request.prompt_token_ids == tuple(byte_tokenizer().encode("hello"))
        assert text == "hello"


def test_token_ids_are_taken_as_they_are() -> None:
    for prompt in (
        [5, 6],
        (5, 6),
        {"prompt_token_ids": [5, 6]},
        {"prompt": None, "prompt_token_ids": [5, 6]},
    ):
        request, text = process(prompt)
        assert request.prompt_token_ids == (5, 6)
        assert text is None


def test_text_beside_token_ids_is_for_display_only() -> None:
    request, text = process({"prompt": "shown", "prompt_token_ids": [5, 6]})
    assert (request.prompt_token_ids, text) == ((5, 6), "shown")


def test_the_request_carries_order_priority_salt_and_the_models_end_of_sequence() -> None:
    request, _ = process({"prompt": "x", "cache_salt": "tenant"}, arrival_number=4, priority=-2)
    assert (request.arrival, request.priority, request.cache_salt) == ((4, 0), -2, "tenant")
    assert request.eos_token_ids == frozenset({EOS})
    assert process("x", cache_salt="other")[0].cache_salt == "other"


def test_a_given_seed_is_taken_modulo_two_to_the_64() -> None:
    assert process("x", params=SamplingParams(seed=3))[0].seed == 3
    assert process("x", params=SamplingParams(seed=-1))[0].seed == 2**64 - 1


def test_a_missing_seed_comes_from_the_engines_seed_and_the_arrival_number() -> None:
    for number in (0, 1, 12):
        digest = hashlib.sha256(struct.pack("<QQ", 7, number)).digest()
        assert process("x", arrival_number=number)[0].seed == int.from_bytes(digest[:8], "little")


@pytest.mark.parametrize("prompt", ["", [], (), {"prompt": ""}, {"prompt_token_ids": []}])
def test_b49_a_prompt_without_tokens_is_refused(prompt: Any) -> None:
    assert "empty" in refusal(prompt)


def test_b49_a_prompt_of_one_special_token_is_a_prompt() -> None:
    assert process("<bos>")[0].prompt_token_ids == (0,)


def test_b51_a_prompt_may_be_one_token_shorter_than_max_model_len() -> None:
    assert len(process([5] * 127, max_model_len=128)[0].prompt_token_ids) == 127
    for length in (128, 129, 5000):
        message = refusal([5] * length, max_model_len=128)
        assert f"{length} tokens" in message
        assert "max_model_len is 128" in message


def test_b51_max_tokens_beyond_max_model_len_is_accepted_here() -> None:
    """Offline generation ends such a request with `length`; only the HTTP edge refuses it."""
    assert process([5] * 100, max_model_len=128, params=SamplingParams(max_tokens=29))


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**40])
def test_ids_outside_the_vocabulary_are_named_with_its_size(token_id: int) -> None:
    for message in (refusal([5, token_id]), refusal("x", params=SamplingParams(stop_token_ids=[token_id]))):
        assert f"Token id {token_id} " in message
        assert f"{VOCAB_SIZE} tokens" in message
    assert process([5, VOCAB_SIZE - 1], params=SamplingParams(stop_token_ids=[VOCAB_SIZE - 1]))


def test_9634_ids_the_tokenizer_does_not_know_are_accepted_if_the_model_has_rows_for_them() -> None:
    config = make_scripted_config()
    small = type("SmallTokenizer", (), {"vocab_size": 10})()
    request, _ = InputProcessor(config, small).process(
        "a", [VOCAB_SIZE - 1], SamplingParams(), arrival_number=0
    )
    assert request.prompt_token_ids == (VOCAB_SIZE - 1,)


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        (None, "NoneType"),
        (5, "int"),
        (b"bytes", "bytes"),
        ([1.0], "integer"),
        ([5, "6"], "integer"),
        ([True], "integer"),
        ([[5]], "integer"),
        ({}, "prompt_token_ids"),
        ({"prompt": None}, "prompt_token_ids"),
        ({"prompt": 5}, "text"),
        ({"prompt": ["x"]}, "text"),
        ({"prompt": {"prompt": "x"}}, "text"),
        ({"prompt_token_ids": "x"}, "list of integers"),
        ({"prompt_token_ids": {"prompt": "x"}}, "list of integers"),
        ({"prompt": "x", "promt": "y"}, "'promt'"),
        ({"prompt": "x", "multi_modal_data": {}}, "'multi_modal_data'"),
        ({"prompt": "x", 3: "y"}, "Unknown key 3"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "x", "cache_salt": 5}, "cache_salt"),
        ({"prompt": "x", "cache_salt": "\ud800"}, "cache_salt"),
        ("half a pair: \udc00", "character 13"),
    ],
)
def test_a_malformed_prompt_is_refused(prompt: Any, word: str) -> None:
    assert word in refusal(prompt)


def test_parameters_of_the_wrong_type_are_refused() -> None:
    assert "SamplingParams" in refusal("x", params={"temperature": 0})
    assert "priority" in refusal("x", priority="high")
    assert "priority" in refusal("x", priority=True)
    assert "twice" in refusal({"prompt": "x", "cache_salt": "a"}, cache_salt="b")
    processor = InputProcessor(make_scripted_config(), byte_tokenizer())
    for request_id in ("", 5, None):
        with pytest.raises(ValueError, match="request_id must be"):
            processor.process(request_id, "x", SamplingParams(), arrival_number=0)


def test_a_refusal_does_not_echo_a_huge_input() -> None:
    assert len(refusal([5, "y" * 10**6])) < 300
    assert len(refusal([5] * 10**5)) < 300
    assert len(refusal({"prompt": "x", "cache_salt": ["y" * 10**6]})) < 300
    assert len(refusal({"prompt": "x", "y" * 10**6: 1})) < 300


def test_bad_words_are_tokenized_at_the_start_of_a_text_and_behind_a_space() -> None:
    tokenizer = byte_tokenizer()
    request, _ = process("x", params=SamplingParams(bad_words=["er", " 7"]))
    assert request.sampling_params.bad_words_token_ids == tuple(
        tuple(tokenizer.encode(text)) for text in ("er", " er", "7", " 7")
    )
    assert len(tokenizer.encode("er")) == 1, "a merge of the byte tokenizer"


def test_the_parameters_learn_the_models_end_of_sequence() -> None:
    request, _ = process("x", params=SamplingParams(stop_token_ids=[9]))
    assert request.sampling_params.all_stop_token_ids == {EOS, 9}


@pytest.mark.parametrize("name", ["allowed_token_ids", "logit_bias", "stop_token_ids"])
@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_b53_a_token_id_outside_the_vocabulary_is_refused(name: str, token_id: int) -> None:
    value: Any = {token_id: 1.0} if name == "logit_bias" else [5, token_id]
    message = refusal("x", params=SamplingParams(**{name: value}))
    assert f"Token id {token_id} in {name} is outside the vocabulary of {VOCAB_SIZE}" in message


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": byte_tokenizer().encode("er"), "bad_words": ["er"]},
        {"allowed_token_ids": [EOS], "min_tokens": 1},
        {"allowed_token_ids": [EOS, 9, *byte_tokenizer().encode("er")], "bad_words": ["er"], "min_tokens": 2,
         "stop_token_ids": [9]},
        {"stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 1},
    ],
)  # fmt: skip
def test_b53_masks_that_leave_no_token_are_refused_at_submission(params: dict[str, Any]) -> None:
    message = refusal("x", params=SamplingParams(**params))
    assert message.startswith("allowed_token_ids, bad_words and min_tokens together leave no token")


def test_masks_that_leave_one_token_are_accepted() -> None:
    params = SamplingParams(allowed_token_ids=[EOS, 9], min_tokens=2)
    assert process("x", params=params)[0].sampling_params == params
