"""Every field of OpenAI's API, as its own client knows it, and every extra of vLLM: honoured or refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from pydantic import ValidationError

from reference.frontend.server.errors import invalid_body
from reference.frontend.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
)
from tools.compat_table import OPENAI

BODIES: dict[type[GenerationRequest], dict[str, Any]] = {
    CompletionRequest: {"prompt": "x"},
    ChatCompletionRequest: {"messages": [{"role": "user", "content": "x"}]},
}
CLIENTS: dict[type[GenerationRequest], Any] = {
    CompletionRequest: Completions.create,
    ChatCompletionRequest: ChatCompletions.create,
}
OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}  # they are not sent
# vLLM's fields beyond OpenAI's: vllm/entrypoints/openai/{completion,chat_completion}/protocol.py in its repository.
VLLM = (
    "use_beam_search", "top_k", "min_p", "repetition_penalty", "watermarking", "length_penalty", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "truncation_side", "allowed_token_ids", "prompt_logprobs", "logprob_token_ids",
    "bad_words", "add_special_tokens", "response_format", "structured_outputs", "priority", "request_id", "session_id",
    "return_tokens_as_token_ids", "return_token_ids", "routed_experts_prompt_start", "return_token_offsets",
    "return_mm_kwargs", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection",
    "thinking_token_budget", "stream_interval",
)  # fmt: skip
VLLM_OF_COMPLETIONS = ("prompt_embeds",)
VLLM_OF_CHATS = (
    "include_reasoning", "echo", "add_generation_prompt", "continue_final_message", "documents", "chat_template",
    "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "return_prompt_text",
)  # fmt: skip

each_endpoint = pytest.mark.parametrize("model", BODIES)


def names_of_the_client(model: type[GenerationRequest]) -> set[str]:
    return set(inspect.signature(CLIENTS[model]).parameters) - OF_THE_CLIENT


@each_endpoint
def test_every_parameter_of_the_openai_client_is_known_by_name(model: type[GenerationRequest]) -> None:
    names = names_of_the_client(model)
    assert {"model", "temperature", "stream", "stream_options"} < names
    assert names - set(model.model_fields) - set(model.refused) == set()
    assert names <= OPENAI, "the table of docs/server.md says whose a field is"


@each_endpoint
def test_every_extra_field_of_vllm_is_known_by_name(model: type[GenerationRequest]) -> None:
    names = {*VLLM, *(VLLM_OF_COMPLETIONS if model is CompletionRequest else VLLM_OF_CHATS)}
    assert names - set(model.model_fields) - set(model.refused) == set()


@each_endpoint
def test_no_field_is_both_honoured_and_refused(model: type[GenerationRequest]) -> None:
    assert set(model.model_fields) & set(model.refused) == set()


@each_endpoint
def test_a_refused_field_is_named_and_is_taken_when_it_asks_for_nothing(
    model: type[GenerationRequest],
) -> None:
    for name, (neutral, reason) in model.refused.items():
        with pytest.raises(ValidationError) as caught:
            model.model_validate(BODIES[model] | {name: {"something": "else"}})
        error = invalid_body(caught.value)
        assert error.param == name
        assert reason in str(error)
        for value in (None, *neutral):
            assert name not in model.model_validate(BODIES[model] | {name: value}).model_fields_set


@each_endpoint
def test_a_field_that_nobody_knows_is_named_too(model: type[GenerationRequest]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(BODIES[model] | {"temprature": 0})
    assert invalid_body(caught.value).param == "temprature"


@each_endpoint
def test_every_honoured_field_refuses_what_it_cannot_be(model: type[GenerationRequest]) -> None:
    """None of them is read past: an object where none belongs is an error that names the field."""
    for name in set(model.model_fields) - {"structured_outputs", "guided_json"}:
        with pytest.raises(ValidationError) as caught:
            model.model_validate(BODIES[model] | {name: {"no": "such"}})
        assert invalid_body(caught.value).param == name


def test_the_options_of_a_stream_are_known_by_name() -> None:
    from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam

    names = set(ChatCompletionStreamOptionsParam.__annotations__)
    assert names - set(StreamOptions.model_fields) - set(StreamOptions.refused) == set()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", [1] * 1000 + ["x"]),
        ("prompt", ["x"] * 1000 + [1]),
        ("stop", [1] * 1000),
        ("stop_token_ids", ["1"] * 1000),
        ("bad_words", [1] * 1000),
        ("logit_bias", dict.fromkeys(map(str, range(20_000)), "x")),
    ],
)
def test_a_list_that_is_wrong_in_many_places_has_few_errors(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "x", name: value})
    assert caught.value.error_count() < 10
    assert invalid_body(caught.value).param == name
