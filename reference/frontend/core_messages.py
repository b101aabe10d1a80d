"""What travels between the API side and the engine core when they are not one thread: commands in, news out.

Records of msgspec, so that a process on the other side of a socket can get them as bytes. Decoding builds exactly the
types written here and nothing else: unlike pickle, a message can never be a program.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from reference.contracts.config import EngineConfig
from reference.contracts.request import EngineCoreRequest
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import EngineCoreOutput
from reference.contracts.structured_outputs import StructuredOutputsParams


class PackedRequest(msgspec.Struct, array_like=True, frozen=True):
    """An `EngineCoreRequest` in types that msgspec knows."""

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]  # the fields of SamplingParams that are not at their defaults
    min_tokens_ids: list[int]  # what `SamplingParams.resolved` had added
    bad_words_token_ids: list[list[int]]
    seed: int
    arrival: tuple[int, int]
    eos_token_ids: list[int]
    priority: int
    cache_salt: str | None
    prompt_embeds: tuple[int, bytes] | None  # hidden size, and float32 [prompt tokens, hidden size]

    @classmethod
    def pack(cls, request: EngineCoreRequest) -> PackedRequest:
        params, embeds = request.sampling_params, request.prompt_embeds
        return cls(
            request_id=request.request_id,
            prompt_token_ids=list(request.prompt_token_ids),
            params=_pack_params(params),
            min_tokens_ids=sorted(params.all_stop_token_ids),
            bad_words_token_ids=[list(word) for word in params.bad_words_token_ids],
            seed=request.seed,
            arrival=request.arrival,
            eos_token_ids=sorted(request.eos_token_ids),
            priority=request.priority,
            cache_salt=request.cache_salt,
            prompt_embeds=None if embeds is None else (embeds.shape[1], np.float32(embeds).tobytes()),
        )

    def unpack(self) -> EngineCoreRequest:
        """The request again. Raises ValueError when the parameters are none that `SamplingParams` takes."""
        embeds = None
        if self.prompt_embeds is not None:
            width, content = self.prompt_embeds
            embeds = np.frombuffer(content, np.float32).reshape(-1, width)  # [T, hidden size]
        return EngineCoreRequest(
            request_id=self.request_id,
            prompt_token_ids=tuple(self.prompt_token_ids),
            sampling_params=_unpack_params(self.params).resolved(
                self.min_tokens_ids, self.bad_words_token_ids
            ),
            seed=self.seed,
            arrival=self.arrival,
            eos_token_ids=frozenset(self.eos_token_ids),
            priority=self.priority,
            cache_salt=self.cache_salt,
            prompt_embeds=embeds,
        )


_PARAMS = {
    field.name: getattr(SamplingParams(), field.name) for field in fields(SamplingParams) if field.init
}


def _pack_params(params: SamplingParams) -> dict[str, Any]:
    changed = {
        name: getattr(params, name) for name, default in _PARAMS.items() if getattr(params, name) != default
    }
    if params.structured_outputs is not None:
        changed["structured_outputs"] = params.structured_outputs.to_json()
    return changed


def _unpack_params(changed: dict[str, Any]) -> SamplingParams:
    structured = changed.get("structured_outputs")
    if structured is not None:
        changed = changed | {"structured_outputs": StructuredOutputsParams.from_json(structured)}
    return SamplingParams(**changed)


class CoreStats(msgspec.Struct, array_like=True, frozen=True):
    """The engine core after a step. Counters are totals since its start; tokens unless said otherwise."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0  # 0 to 1
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    # Drafts that were checked: how often, how many, and how many of them were right, in all and by place in the row.
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_position: list[int] = []
    step_tokens: int = 0  # computed by this step
    queue_times: dict[
        str, float
    ] = {}  # request admitted by this step for the first time -> seconds it had waited


# Commands to the core.


class AddRequest(msgspec.Struct, tag=True, frozen=True):
    request: PackedRequest


class AbortRequests(msgspec.Struct, tag=True, frozen=True):
    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    call_id: int


class WatchSteps(msgspec.Struct, tag=True, frozen=True):
    """From now on send the trace of every step, beginning with a keyframe, or none any more."""

    watched: bool


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Leave the loop; unfinished requests are dropped."""


Command = AddRequest | AbortRequests | ResetPrefixCache | WatchSteps | Shutdown


# News from the core.


class CoreReady(msgspec.Struct, tag=True, frozen=True):
    config: EngineConfig
    model_path: str


class StepRecord(msgspec.Struct, array_like=True, frozen=True):
    """The trace of a step that is complete: see `EngineCoreLoop`."""

    is_keyframe: bool
    content: str  # JSON: see `trace_file`


class StepNews(msgspec.Struct, tag=True, frozen=True):
    outputs: list[EngineCoreOutput]
    stats: CoreStats
    traces: list[StepRecord] = []


class CallResult(msgspec.Struct, tag=True, frozen=True):
    call_id: int
    value: bool


class CoreFailed(msgspec.Struct, tag=True, frozen=True):
    """The last message: the core cannot start, or cannot go on."""

    reason: str
    is_refusal: bool = False  # the user's mistake: an option or a model that cannot be


News = CoreReady | StepNews | CallResult | CoreFailed
