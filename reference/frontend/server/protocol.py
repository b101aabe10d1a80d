"""What clients may send: OpenAI's completion and chat requests, with vLLM's extra fields.

Types are strict ("2" is no number), `null` means absent, and a field that cannot be honoured is refused by name. Ranges
are checked where the parameter lives: see `reference.contracts.sampling_params`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator, model_validator

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _FailFast(FailFast):
    __hash__ = object.__hash__  # what stands in a union needs one


# A list that is wrong says so at its first entry. An error for each of a hundred thousand takes half a second, in which
# nobody else is served.
FIRST_ERROR = _FailFast()
Texts = Annotated[list[str], FIRST_ERROR]
MAX_BIASES = 16384  # the same of a table, which cannot stop at its first error
TokenIds = Annotated[list[TokenId], FIRST_ERROR]


class Strict(BaseModel):
    """A JSON object of known fields.

    `refused`: fields of the real API that this server cannot honour, each with the values that ask for nothing and are
    therefore taken, and the reason.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        present = {}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in content.items():
            if value is None:
                continue
            if name in cls.refused:
                neutral, reason = cls.refused[name]
                if not any(value == item and type(value) is type(item) for item in neutral):
                    raise ValueError(f"'{name}' is not supported: {reason}.")
                continue
            if name not in known:
                # Now, and not by pydantic, which makes an error of each: a hundred thousand names would take seconds.
                raise ValueError(f"'{name[:100]}' is not supported: this server does not know it.")
            present[name] = value
        return present


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    refused = {"include_obfuscation": ((False,), "nothing is added to a stream")}


class JsonSchema(Strict):
    name: str | None = Field(None, max_length=64)
    description: str | None = Field(None, max_length=4096)
    content: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("'json_schema' belongs to the type json_schema, and is needed there.")
        return self


class GenerationRequest(Strict):
    """Fields that completions and chats have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Int64 | None = None
    seed: Seed | None = None
    stop: str | Texts | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = Field(None, max_length=256)
    # vLLM's
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Int64 | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    priority: Int64 | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    return_token_ids: bool = False
    prompt_logprobs: Int64 | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_enough_to_look_at(cls, table: Any) -> Any:
        if isinstance(table, dict) and len(table) > MAX_BIASES:
            raise ValueError(f"{len(table)} entries are too many.")
        return table

    def structured_tables(self) -> dict[str, dict[str, Any]]:
        """What constrains the output, by the field that says so, in the form of vLLM's `structured_outputs`."""
        tables = {}
        for kind in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{kind}")
            if value is not None:
                tables[f"guided_{kind}"] = {kind: value}
        if self.structured_outputs is not None:
            tables["structured_outputs"] = self.structured_outputs
        if self.response_format is not None and self.response_format.type != "text":
            schema = self.response_format.json_schema
            tables["response_format"] = {"json_object": True} if schema is None else {"json": schema.content}
        return tables

    def sampling_options(self) -> dict[str, Any]:
        """Fields that go to `SamplingParams` as they are."""
        names = (
            "n", "seed", "stop", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias",
            "top_k", "min_p", "repetition_penalty", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
            "min_tokens", "skip_special_tokens", "allowed_token_ids", "bad_words", "prompt_logprobs",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


_COMMON_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "ask for n completions and choose yourself"),
    "use_beam_search": ((False,), "beam search does not exist here"),
    "length_penalty": ((1, 1.0), "it belongs to beam search"),
    "early_stopping": ((False,), "it belongs to beam search"),
    "logits_processors": (([],), "a request cannot bring code"),
    "truncate_prompt_tokens": ((), "a prompt is taken as it is, or refused"),
    "spaces_between_special_tokens": ((True,), "the tokenizer decides"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "kv_transfer_params": (({},), "there is no other server to take K and V from"),
    "ec_transfer_params": (({},), "there is no other server to take anything from"),
    "vllm_xargs": (({},), "there are no extensions that could take them"),
    "truncation_side": ((), "a prompt is taken as it is, or refused"),
    "logprob_token_ids": ((), "ask for the most probable tokens with logprobs"),
    "watermarking": ((False,), "no text is marked"),
    "repetition_detection": ((), "use the penalties, or stop"),
    "thinking_token_budget": ((), "models here do not think first"),
    "stream_interval": ((1,), "every step is sent; a slow reader gets several at once"),
    "request_id": ((), "send it as the header X-Request-Id"),
    "session_id": ((), "equal prefixes are found without it"),
    "return_token_offsets": ((False,), "use return_token_ids"),
    "return_mm_kwargs": ((True, False), "only text is understood"),
    "routed_experts_prompt_start": ((0,), "models here have no experts"),
    "store": ((False,), "nothing is stored"),
    "metadata": (({},), "nothing is stored"),
    "service_tier": (("auto", "default"), "there is one tier of service"),
    "safety_identifier": ((), "use 'user'"),
    "prompt_cache_key": ((), "use cache_salt"),
    "prompt_cache_retention": (("in_memory",), "cached blocks stay until their place is needed"),
    "prompt_cache_options": (({},), "the prefix cache has no options"),
    "moderation": ((), "nothing is judged"),
}


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], FIRST_ERROR]
    max_tokens: Int64 | None = None
    echo: bool = False
    logprobs: Int64 | None = None
    add_special_tokens: bool = True

    refused = _COMMON_REFUSED | {
        "suffix": (("",), "text cannot be inserted before a suffix"),
        "prompt_embeds": ((), "send text or token ids"),
    }


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[TextPart], FIRST_ERROR]

    refused = {
        "name": ((), "the chat template knows roles only"),
        "tool_calls": (([],), "this server calls no tools"),
        "tool_call_id": ((), "this server calls no tools"),
        "function_call": ((), "this server calls no tools"),
        "refusal": ((), "only content is read"),
        "audio": ((), "only text is understood"),
        "annotations": (([],), "only content is read"),
        "reasoning": ((), "only content is read"),
        "reasoning_content": ((), "only content is read"),
    }

    def as_text(self) -> dict[str, str]:
        content = (
            self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        )
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], FIRST_ERROR] = Field(min_length=1, max_length=4096)
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool = False
    top_logprobs: Int64 | None = None
    add_generation_prompt: bool = True
    chat_template: str | None = Field(None, max_length=65536)

    refused = _COMMON_REFUSED | {
        "tools": (([],), "this server calls no tools"),
        "tool_choice": (("none", "auto"), "this server calls no tools"),
        "parallel_tool_calls": ((True, False), "this server calls no tools"),
        "functions": (([],), "this server calls no tools"),
        "function_call": (("none", "auto"), "this server calls no tools"),
        "modalities": ((["text"],), "only text is understood"),
        "audio": ((), "only text is understood"),
        "prediction": ((), "a predicted output is not used"),
        "reasoning_effort": (("none",), "models here do not think first"),
        "verbosity": (("medium",), "say in the prompt how long the answer is to be"),
        "web_search_options": ((), "no page is ever fetched"),
        "echo": ((False,), "an answer does not repeat the conversation"),
        "chat_template_kwargs": (({},), "chat templates take no arguments here"),
        "documents": (([],), "put them into a message"),
        "continue_final_message": ((False,), "an answer is always a new message"),
        "include_reasoning": ((True, False), "models here do not think first"),
        "mm_processor_kwargs": (({},), "only text is understood"),
        "add_special_tokens": ((False,), "the chat template writes all special tokens"),
        "tool_stream": ((False,), "this server calls no tools"),
        "media_io_kwargs": (({},), "only text is understood"),
        "return_prompt_text": ((False,), "/detokenize gives the text of prompt_token_ids"),
    }


class TokenizeRequest(Strict):
    """POST /tokenize: a prompt, or messages as a chat would tokenize them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], FIRST_ERROR] | None = Field(None, min_length=1, max_length=4096)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("'prompt' or 'messages' must be given, and not both.")
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize"""

    model: str | None = None
    tokens: TokenIds
