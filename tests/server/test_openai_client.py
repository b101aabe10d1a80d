"""The `openai` library against a real server process: whatever it can ask for is answered as it expects."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.llm import LLM
from reference.frontend.tiers import load_tier
from tests.server.processes import ServerProcess, scripted_server

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return server.client()


def offline(server: ServerProcess, tier_name: str, prompt: Any, **params: Any) -> Any:
    """What the engine itself says to it."""
    llm = LLM(load_tier(tier_name), model=server.model)
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.max_model_len == 128  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "max_tokens": 12},
        {"seed": 7, "max_tokens": 12, "temperature": 1.5, "top_p": 0.9},
        {"seed": 7, "n": 3, "max_tokens": 9},
        {"temperature": 0, "max_tokens": 12, "frequency_penalty": 1.5, "logit_bias": {"70": 3}},
        {"temperature": 0, "max_tokens": 12, "presence_penalty": 1.5},
        {"temperature": 0, "max_tokens": 30, "stop": ["t", "e"]},
        {"temperature": 0, "max_tokens": 12, "logprobs": 2},
    ],
)  # fmt: skip
def test_completions_say_what_the_engine_says_streamed_or_not(
    server: ServerProcess, client: openai.OpenAI, tier_name: str, options: dict[str, Any]
) -> None:
    expected = offline(server, tier_name, "Hello there", **options)
    answer = client.completions.create(model="tiny", prompt="Hello there", **options)
    assert [(c.text, c.finish_reason) for c in answer.choices] == [
        (c.text, c.finish_reason) for c in expected.outputs
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(c.token_ids) for c in expected.outputs)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    chunks = list(
        client.completions.create(
            model="tiny", prompt="Hello there", stream=True, stream_options={"include_usage": True}, **options
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for whole in answer.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == whole.index]
        assert "".join(part.text for part in parts) == whole.text
        if whole.logprobs is not None:
            tokens = [t for part in parts if part.logprobs for t in part.logprobs.tokens or ()]
            offsets = [o for part in parts if part.logprobs for o in part.logprobs.text_offset or ()]
            assert tokens == whole.logprobs.tokens
            assert offsets == whole.logprobs.text_offset


def test_prompts_come_as_text_as_ids_and_in_lists(server: ServerProcess, client: openai.OpenAI) -> None:
    ids = server.post("/tokenize", {"prompt": "Hello"}).json()["tokens"]
    other = server.post("/tokenize", {"prompt": "world"}).json()["tokens"]
    options: Any = {"model": "tiny", "temperature": 0, "max_tokens": 6, "n": 2}
    text = client.completions.create(prompt="Hello", **options)
    assert client.completions.create(prompt=ids, **options).choices == text.choices
    many = client.completions.create(prompt=["Hello", "world"], **options)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert [c.text for c in many.choices[:2]] == [c.text for c in text.choices]
    assert client.completions.create(prompt=[ids, other], **options).choices == many.choices
    assert many.usage is not None
    assert many.usage.prompt_tokens == len(ids) + len(other)
    assert many.usage.completion_tokens == 24


def test_chats_say_the_same_streamed_or_not(
    server: ServerProcess, client: openai.OpenAI, tier_name: str
) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "seed": 3, "n": 2, "max_completion_tokens": 9}
    llm = LLM(load_tier(tier_name), model=server.model)
    expected = llm.chat(MESSAGES, SamplingParams(seed=3, n=2, max_tokens=9), use_tqdm=False)[0]
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert [c.message.content for c in answer.choices] == [c.text for c in expected.outputs]
    assert all(choice.message.role == "assistant" for choice in answer.choices)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    chunks = list(client.chat.completions.create(**options, stream=True, logprobs=True, top_logprobs=2))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    for whole in answer.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == whole.index]
        assert "".join(part.delta.content or "" for part in parts) == whole.message.content
        assert parts[0].delta.role == "assistant"
        assert whole.logprobs is not None
        streamed = [e for part in parts if part.logprobs for e in part.logprobs.content or ()]
        assert [e.token for e in streamed] == [e.token for e in whole.logprobs.content or ()]
        assert all(len(e.top_logprobs) == 2 for e in streamed)


def test_the_answer_of_a_chat_can_be_sent_back_as_it_is(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, seed=1)
    history = [*MESSAGES, answer.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
    again = client.chat.completions.create(model="tiny", messages=history, max_tokens=4, seed=1)
    assert again.choices[0].finish_reason in ("length", "stop")


def test_content_may_come_in_parts_of_text_and_nothing_else(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "temperature": 0, "max_tokens": 5}
    parts: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}
    ]
    whole: Any = [{"role": "user", "content": "Hello"}]
    assert (
        client.chat.completions.create(messages=parts, **options).choices
        == client.chat.completions.create(messages=whole, **options).choices
    )
    image: Any = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1"}}]}
    ]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=image, **options)
    assert caught.value.param == "messages"


def test_extra_fields_of_vllm_are_honoured(
    server: ServerProcess, client: openai.OpenAI, tier_name: str
) -> None:
    extra: dict[str, Any] = {
        "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.3, "ignore_eos": True, "min_tokens": 3,
        "stop_token_ids": [70], "bad_words": ["n"], "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }  # fmt: skip
    expected = offline(server, tier_name, "Hello", seed=5, max_tokens=20, **extra)
    answer = client.completions.create(
        model="tiny", prompt="Hello", seed=5, max_tokens=20, extra_body={**extra, "return_token_ids": True}
    )
    choice: Any = answer.choices[0]
    assert choice.token_ids == expected.outputs[0].token_ids
    assert choice.text == expected.outputs[0].text
    assert choice.stop_reason == expected.outputs[0].stop_reason
    assert choice.prompt_token_ids == expected.prompt_token_ids
    (only,) = client.completions.create(
        model="tiny",
        prompt="Hello",
        max_tokens=3,
        extra_body={"allowed_token_ids": [66], "return_token_ids": True},
    ).choices
    assert only.token_ids == [66, 66, 66]  # type: ignore[attr-defined]


def test_token_ids_are_streamed_and_those_of_the_prompt_once(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="tiny",
        prompt="Hello",
        seed=5,
        max_tokens=6,
        stream=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    choices: list[Any] = [chunk.choices[0] for chunk in stream]
    assert sum(len(choice.token_ids) for choice in choices) == 6
    assert choices[0].prompt_token_ids
    assert all(choice.prompt_token_ids is None for choice in choices[1:])


def test_usage_can_be_told_with_every_chunk(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, seed=2, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )  # fmt: skip
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage is not None]
    assert len(counts) > 1
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2]


def test_cached_tokens_are_told(server: ServerProcess, client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "prompt": "cached " * 10, "max_tokens": 1}
    for salt, cached in (("one", 0), ("one", 64), ("two", 0)):
        usage = client.completions.create(**options, extra_body={"cache_salt": salt}).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None  # type: ignore[attr-defined]
        assert usage.prompt_tokens_details.cached_tokens == cached  # type: ignore[attr-defined]


def test_many_clients_at_once_get_what_each_gets_alone(server: ServerProcess, tier_name: str) -> None:
    texts = [f"number {i} of some" for i in range(16)]
    llm = LLM(load_tier(tier_name), model=server.model, enable_prefix_caching=False)
    params = [SamplingParams(seed=i, max_tokens=10) for i in range(16)]
    alone = [
        llm.generate(t, p, use_tqdm=False)[0].outputs[0].text for t, p in zip(texts, params, strict=True)
    ]

    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        if i % 2:
            answer = await client.completions.create(model="tiny", prompt=texts[i], seed=i, max_tokens=10)
            return answer.choices[0].text
        stream = await client.completions.create(
            model="tiny", prompt=texts[i], seed=i, max_tokens=10, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, i) for i in range(16)))

    assert asyncio.run(run()) == alone
    assert server.is_idle()


def test_an_unknown_model_and_an_unknown_endpoint_are_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="x")
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")


def test_text_becomes_tokens_and_tokens_text(server: ServerProcess, client: openai.OpenAI) -> None:
    tokens = server.post("/tokenize", {"prompt": "Hello, wörld", "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 128
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "Hello, wörld"}
    assert server.post("/detokenize", {"tokens": [9999]}).status_code == 400
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()
    usage = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1).usage
    assert usage is not None
    assert chat["count"] == usage.prompt_tokens
    assert (
        server.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()["count"]
        < chat["count"]
    )
    assert server.post("/tokenize", {"messages": MESSAGES, "prompt": "x"}).status_code == 400
    assert server.post("/tokenize", {}).status_code == 400


def test_a_request_may_bring_a_template_where_that_is_allowed(server: ServerProcess, tier_name: str) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0,
        "max_tokens": 4,
    }
    template = "{% for m in messages %}{{ m.content }}!{% endfor %}"
    answer = server.post("/v1/chat/completions", body | {"chat_template": template}).json()
    plain = server.post("/v1/completions", {"prompt": "Hi!", "temperature": 0, "max_tokens": 4}).json()
    assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    for hostile in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ nothing.of.this }}", "{% for %}", "{{ 1 / 0 }}",
    ):  # fmt: skip
        response = server.post("/v1/chat/completions", body | {"chat_template": hostile})
        assert response.status_code == 400, hostile
        assert response.json()["error"]["param"] == "messages"
    with scripted_server(load_tier(tier_name)) as strict:
        response = strict.post("/v1/chat/completions", body | {"chat_template": template})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "chat_template"
