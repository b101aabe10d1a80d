"""Reports against other servers, each as the smallest request that shows it."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import openai
import pytest

from reference.contracts.protocols import Tier
from reference.frontend.server.args import ServerArgs
from tests.scripted import EOS, byte_tokenizer
from tests.server.processes import Always, Endpoint, ServerProcess, scripted_server

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}


def events(server: Endpoint, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream, parsed; `[DONE]` stays text."""
    response = server.post(path, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def is_served(server: Endpoint) -> bool:
    return server.post("/v1/completions", {"prompt": "next", **GREEDY}).status_code == 200


def param_of(server: Endpoint, body: dict[str, Any], path: str = "/v1/completions") -> str:
    """The parameter that a refused request is refused for."""
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == 400
    return str(error["param"])


def test_b19_two_requests_under_one_client_chosen_id_do_not_meet(tier: Tier) -> None:
    headers = {"X-Request-Id": "mine"}
    with scripted_server(tier, pause=0.02) as server:
        body = {"prompt": [5], "max_tokens": 12, "return_token_ids": True}
        answers: list[Any] = []
        threads = [
            threading.Thread(
                target=lambda: answers.append(server.post("/v1/completions", body, headers=headers))
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [a.status_code for a in answers] == [200, 200]
        assert [a.headers["x-request-id"] for a in answers] == ["mine", "mine"]
        assert {a.json()["id"] for a in answers} == {"cmpl-mine"}
        assert all(len(a.json()["choices"][0]["token_ids"]) == 12 for a in answers)
        assert is_served(server)
        assert server.is_idle()


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12])
def test_b23_a_tiny_temperature_is_greedy_and_overflows_nothing(
    server: ServerProcess, temperature: float
) -> None:
    body = {"prompt": "Once", "max_tokens": 8, "return_token_ids": True, "seed": 1}
    answers = [server.post("/v1/completions", body | {"temperature": t}).json() for t in (0, temperature)]
    assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]
    assert len(answers[0]["choices"][0]["token_ids"]) > 0


EMOJI = byte_tokenizer().encode("😊")


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_b37_half_a_character_at_the_end_is_one_replacement_in_both_modes(
    tier: Tier, num_tokens: int
) -> None:
    assert len(EMOJI) == 4
    with scripted_server(tier, script=Always(EMOJI)) as server:
        body = {"prompt": [5], "max_tokens": num_tokens}
        choice = server.post("/v1/completions", body).json()["choices"][0]
        assert choice["text"] == byte_tokenizer().decode(EMOJI[:num_tokens])
        assert set(choice["text"]) == {"\ufffd"}
        assert choice["finish_reason"] == "length"
        chunks = [e["choices"][0]["text"] for e in events(server, "/v1/completions", body)[:-1]]
        assert "".join(chunks) == choice["text"]


def test_b43_logprobs_of_the_sampled_token_alone(server: ServerProcess) -> None:
    choice = server.post("/v1/completions", {"prompt": "Hi", "logprobs": 0, **GREEDY}).json()["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"]) == 4
    assert choice["logprobs"]["top_logprobs"] is None
    messages = [{"role": "user", "content": "Hi"}]
    for more in ({}, {"top_logprobs": 0}):
        body = {"messages": messages, "logprobs": True, **GREEDY, **more}
        content = server.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
        assert len(content) == 4
        assert all(entry["top_logprobs"] == [] for entry in content)
    unasked = server.post("/v1/chat/completions", {"messages": messages, **GREEDY}).json()
    assert unasked["choices"][0]["logprobs"] is None


def test_b45_echo_without_anything_to_generate(server: ServerProcess) -> None:
    body = {"prompt": ["Hello", "world"], "echo": True, "max_tokens": 0, "n": 2}
    answer = server.post("/v1/completions", body).json()
    assert [c["text"] for c in answer["choices"]] == ["Hello", "Hello", "world", "world"]
    assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0
    counts = [server.post("/tokenize", {"prompt": text}).json()["count"] for text in ("Hello", "world")]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(counts)
    streamed = events(server, "/v1/completions", body)
    assert [e["choices"][0]["text"] for e in streamed[:-1]] == ["Hello", "Hello", "world", "world"]
    assert streamed[-1] == "[DONE]"


def test_b45_echo_stands_before_the_generated_text(server: ServerProcess) -> None:
    body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
    plain = server.post("/v1/completions", body).json()
    echoed = server.post("/v1/completions", body | {"echo": True}).json()
    assert echoed["choices"][0]["text"] == "Hello" + plain["choices"][0]["text"]
    assert echoed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    streamed = events(server, "/v1/completions", body | {"echo": True})
    assert "".join(e["choices"][0]["text"] for e in streamed[:-1]) == echoed["choices"][0]["text"]
    assert param_of(server, body | {"max_tokens": 0}) == "max_tokens"


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_b45_echo_with_logprobs_scores_the_prompt(server: ServerProcess, max_tokens: int) -> None:
    body = {"prompt": "Hello", "echo": True, "logprobs": 1, "temperature": 0, "max_tokens": max_tokens}
    answer = server.post("/v1/completions", body).json()
    num_prompt_tokens = answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == max_tokens
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["finish_reason"] == "length"
    assert {len(values) for values in logprobs.values()} == {num_prompt_tokens + max_tokens}
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"][:num_prompt_tokens]) == "Hello"
    assert logprobs["text_offset"][:num_prompt_tokens] == [0, 1, 2, 3, 4][:num_prompt_tokens]
    assert choice["text"].startswith("Hello")
    assert (choice["text"] == "Hello") == (max_tokens == 0)
    *chunks, done = events(server, "/v1/completions", body)
    assert done == "[DONE]"
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in streamed) == choice["text"]
    assert [v for part in streamed for v in part["logprobs"]["tokens"]] == logprobs["tokens"]
    assert [part["finish_reason"] for part in streamed if part["finish_reason"]] == ["length"]


def test_the_logprobs_of_a_prompt_are_told_by_token_id(server: ServerProcess) -> None:
    body: dict[str, Any] = {"prompt": [70, 71, 72], "prompt_logprobs": 2, **GREEDY}
    tables = server.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert tables[0] is None
    assert [next(iter(table)) for table in tables[1:]] == ["71", "72"]
    assert all(
        entry["logprob"] <= 0 and entry["rank"] >= 1 for table in tables[1:] for entry in table.values()
    )
    assert param_of(server, body | {"stream": True}) == "prompt_logprobs"
    chat = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0, **GREEDY}
    choice = server.post("/v1/chat/completions", chat).json()["choices"][0]
    assert all(len(table) == 1 for table in choice["prompt_logprobs"][1:])


OBJECT = r'\{\s*"a"\s*:\s*(true|false)\s*\}'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, OBJECT),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, r'\{"a":(true|false)\}'),
        ({"guided_json": json.dumps(SCHEMA)}, OBJECT),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "x" "y"'}, "xy"),
    ],
)  # fmt: skip
def test_an_answer_can_be_constrained_streamed_or_not(
    server: ServerProcess, constraint: dict[str, Any], pattern: str
) -> None:
    # A space costs so much that a small model does not write spaces for ever.
    body = {"prompt": "say", "max_tokens": 60, "seed": 4, **constraint}
    space, newline, tab = (server.post("/tokenize", {"prompt": c}).json()["tokens"][0] for c in " \n\t")
    body["logit_bias"] = {str(space): -100, str(newline): -100, str(tab): -100}
    answer = server.post("/v1/completions", body).json()["choices"][0]
    assert re.fullmatch(pattern, answer["text"]), answer["text"]
    assert answer["finish_reason"] == "stop"
    parts = events(server, "/v1/completions", body)[:-1]
    assert "".join(part["choices"][0]["text"] for part in parts) == answer["text"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "xml"}), ("response_format", {"type": "json_schema"}), ("guided_regex", "("),
        ("response_format", {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}), ("structured_outputs", {"nonsense": 1}),
        ("structured_outputs", {}), ("guided_choice", []), ("guided_grammar", ""), ("guided_json", "{"),
    ],
)  # fmt: skip
def test_a_constraint_that_makes_no_sense_is_refused(server: ServerProcess, field: str, value: Any) -> None:
    param = param_of(server, {"prompt": "x", **GREEDY, field: value})
    assert param in (field, "structured_outputs")
    assert is_served(server)


def test_two_constraints_at_once_are_refused(server: ServerProcess) -> None:
    body = {"prompt": "x", **GREEDY, "guided_regex": "a", "response_format": {"type": "json_object"}}
    assert param_of(server, body) == "guided_regex"
    assert server.post("/v1/completions", body | {"response_format": {"type": "text"}}).status_code == 200


def test_b47_the_bytes_of_all_tokens_are_the_bytes_of_the_text(tier: Tier) -> None:
    with scripted_server(tier, script=Always([*EMOJI, EOS]), second=EMOJI[0]) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
        choice = server.post("/v1/chat/completions", body).json()["choices"][0]
        content = choice["logprobs"]["content"]
        assert choice["message"]["content"] == "😊"
        assert [byte for entry in content[:4] for byte in entry["bytes"]] == [240, 159, 152, 138]
        for entry in content[:4]:
            assert [other["bytes"] for other in entry["top_logprobs"]][1:] in ([[240]], [])
            assert entry["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry["bytes"])
        body = {"prompt": [5], "logprobs": 2}
        logprobs = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
        assert logprobs["text_offset"] == [0, 0, 0, 0, 1]
        assert len(set(logprobs["tokens"])) == 5


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[5], []]])
def test_b49_an_empty_prompt_is_refused_and_the_next_one_served(server: ServerProcess, prompt: Any) -> None:
    assert param_of(server, {"prompt": prompt, **GREEDY}) == "prompt"
    assert is_served(server)


def test_b49_an_empty_message_and_a_prompt_of_special_tokens_are_prompts(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": ""}], **GREEDY}
    assert server.post("/v1/chat/completions", body).status_code == 200
    assert server.post("/v1/completions", {"prompt": "<bos><eos>", **GREEDY}).status_code == 200
    assert server.post("/v1/completions", {"prompt": [0, 1], **GREEDY}).json()["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "status"),
    [(127, 1, 200), (128, 1, 400), (100, 29, 400), (8, 121, 400), (8, 120, 200)],
)
def test_b51_prompt_and_answer_fit_into_the_maximum_length_or_are_refused(
    server: ServerProcess, num_prompt_tokens: int, max_tokens: int, status: int
) -> None:
    body = {"prompt": [9] * num_prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True}
    response = server.post("/v1/completions", body)
    assert response.status_code == status
    if status == 400:
        message = response.json()["error"]["message"]
        assert " 128" in message
        assert f" {num_prompt_tokens} tokens" in message
    else:
        assert response.json()["usage"]["completion_tokens"] == max_tokens


def test_b51_without_max_tokens_a_chat_goes_on_to_the_maximum_length(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 80}], "ignore_eos": True}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 128


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 999999), ("temperature", -1), ("top_p", -1), ("top_p", 0), ("repetition_penalty", 0),
        ("min_p", 2), ("presence_penalty", 3), ("n", 0), ("n", 65), ("n", "2"), ("n", 1.5), ("n", True),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 10**30),
        ("min_tokens", 99), ("logprobs", 21), ("logprobs", -1), ("seed", 2**64), ("seed", "x"),
        ("bad_words", [" "]), ("bad_words", [""]), ("stop", [""]), ("stop", ["a"] * 5), ("stop", "a" * 257),
        ("stop_token_ids", [9999]), ("allowed_token_ids", []), ("logit_bias", {"9999": 1}), ("logit_bias", {"x": 1}),
        ("top_k", -2), ("priority", 2**70), ("cache_salt", ""), ("prompt", [9999]), ("prompt", [-1]), ("prompt", None),
        ("prompt", {"a": 1}), ("prompt", [["a"]]), ("tools", [{"type": "function"}]), ("suffix", "x"), ("best_of", 2),
        ("nonsense", 1), ("stream", "yes"), ("stream_options", {"include_usage": True}), ("echo", 1),
    ],
)  # fmt: skip
def test_b53_what_is_out_of_range_is_refused_by_name(server: ServerProcess, field: str, value: Any) -> None:
    assert param_of(server, {"prompt": "x", **GREEDY, field: value}) == field


def test_b53_contradictions_are_refused(server: ServerProcess) -> None:
    token = server.post("/tokenize", {"prompt": "q"}).json()["tokens"]
    body = {"prompt": "x", "allowed_token_ids": token, "bad_words": ["q"], **GREEDY}
    assert param_of(server, body) == "allowed_token_ids"
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert param_of(server, chat | {"top_logprobs": 2}, "/v1/chat/completions") == "top_logprobs"
    two_limits = {"max_tokens": 1, "max_completion_tokens": 2}
    assert param_of(server, chat | two_limits, "/v1/chat/completions") == "max_tokens"
    assert is_served(server)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("ending", ["stop", "length"])
def test_b55_finish_reason_is_always_there_and_said_once_a_choice(
    server: ServerProcess, n: int, ending: str
) -> None:
    # One allowed token that ends the text after the first: the natural stop comes without a script.
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "n": n, "max_tokens": 3}
    if ending == "stop":
        body |= {"logit_bias": {"1": 100}, "min_tokens": 1}
    else:
        body |= {"ignore_eos": True}
    chunks = events(server, "/v1/chat/completions", body)[:-1]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert all("finish_reason" in choice for choice in choices)
    for index in range(n):
        reasons = [choice["finish_reason"] for choice in choices if choice["index"] == index]
        assert [reason for reason in reasons if reason is not None] == [ending]
        assert reasons[-1] == ending
        roles = [c["delta"].get("role") for c in choices if c["index"] == index]
        assert roles[0] == "assistant"
        assert not any(roles[1:])


def test_b57_a_stream_whose_engine_fails_ends_with_an_error_and_done(tier: Tier) -> None:
    with scripted_server(tier, raise_at={3: RuntimeError("out of luck")}) as server:
        body = {"prompt": [5], "max_tokens": 9, "return_token_ids": True}
        *chunks, error, done = events(server, "/v1/completions", body)
        assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 3
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert error["error"]["code"] == 500
        assert "out of luck" in error["error"]["message"]
        assert done == "[DONE]"
        assert is_served(server)


def test_b57_the_client_library_raises_that_error(tier: Tier) -> None:
    with scripted_server(tier, raise_at={3: RuntimeError("out of luck"), 4: RuntimeError("again")}) as server:
        stream = server.client().completions.create(model="script", prompt=[5], max_tokens=9, stream=True)
        with pytest.raises(openai.APIError, match="out of luck"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="again"):
            server.client().completions.create(model="script", prompt=[5], max_tokens=9)
        assert is_served(server)


def test_two_priorities_and_two_choices_are_served_under_the_priority_policy(tier: Tier) -> None:
    # vLLM 29747: equal priority and arrival must never compare request objects.
    with scripted_server(tier, config={"scheduling_policy": "priority"}) as server:
        for priority in (1, 0, -(2**63)):
            response = server.post(
                "/v1/completions", {"prompt": [[5], [6]], "priority": priority, "max_tokens": 2}
            )
            assert response.status_code == 200


def test_half_a_million_stop_strings_are_refused_before_any_work(tier: Tier) -> None:
    # vLLM 51447: 54 s of work.
    with scripted_server(tier) as server:
        for count, sentence in ((500_000, "more than 131072 values"), (100_000, "100000 entries")):
            response = server.post("/v1/completions", {"prompt": "x", "stop": ["abc"] * count})
            assert response.status_code == 400
            assert sentence in response.json()["error"]["message"]
            assert len(response.content) < 4096


def test_an_error_never_repeats_what_was_sent(tier: Tier) -> None:
    # vLLM 49239: 12,047 errors, 114 MB.
    with scripted_server(tier, ServerArgs(access_log=False)) as server:
        secret = "s3cret" * 10_000
        for body in (
            {"prompt": {"a": secret}}, {"prompt": "x", "n": secret}, {"prompt": "x", secret: 1},
            {"prompt": "x", "stop": [secret]}, {"prompt": "x", "logit_bias": {secret: 1}},
            {"prompt": "x", "model": secret}, [secret], secret,
        ):  # fmt: skip
            response = server.post("/v1/completions", body)
            assert response.status_code in (400, 404)
            assert len(response.content) < 4096
            assert secret[:200] not in response.text
