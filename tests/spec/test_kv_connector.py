"""The seam for K and V from elsewhere: who asks when, and what a connector's tokens spare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reference.contracts.protocols import NullKVConnector, Tier
from reference.contracts.request import Request
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput
from reference.frontend.tiers import load_tier
from tests.factories import Driver, make_config, make_request
from tests.tiny_models import make_tiny_llama

BLOCK_SIZE = 4


class DiaryConnector(NullKVConnector):
    """Has nothing, and writes down what it is asked and told."""

    def __init__(self) -> None:
        self.diary: list[tuple[Any, ...]] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        self.diary.append(("ask", request.request_id, num_computed_tokens))
        return 0

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        self.diary.append(("alloc", request.request_id, tuple(block_ids), num_external_tokens))

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> None:
        self.diary.append(("finished", request.request_id, tuple(block_ids), request.num_computed_tokens))


def test_a_connector_is_asked_behind_the_prefix_hit_and_told_of_admission_and_end(tier: Tier) -> None:
    driver = Driver(tier, make_config(block_size=BLOCK_SIZE))
    connector = DiaryConnector()
    driver.scheduler.kv_connector = connector
    driver.add(make_request("a", [7] * 6, max_tokens=1))
    driver.run()
    driver.add(make_request("b", [7] * 6, arrival=1, max_tokens=1))
    driver.run()
    assert connector.diary == [
        ("ask", "a", 0),
        ("alloc", "a", (1, 2), 0),
        ("finished", "a", (1, 2), 6),
        ("ask", "b", 4),
        ("alloc", "b", (1, 2), 0),
        ("finished", "b", (1, 2), 6),
    ]


def test_a_connector_is_not_asked_for_a_prompt_that_is_scored(tier: Tier) -> None:
    driver = Driver(tier, make_config(block_size=BLOCK_SIZE))
    connector = DiaryConnector()
    driver.scheduler.kv_connector = connector
    driver.add(make_request("a", 6, max_tokens=1, prompt_logprobs=0))
    driver.run()
    assert [entry[0] for entry in connector.diary] == ["alloc", "finished"]


def test_a_request_that_failed_is_not_offered_to_the_connector(tier: Tier) -> None:
    driver = Driver(tier, make_config(block_size=BLOCK_SIZE))
    connector = DiaryConnector()
    driver.scheduler.kv_connector = connector
    driver.add(make_request("a", 6))
    driver.scheduler.fail_step(driver.schedule(), "planned failure")
    assert [entry[0] for entry in connector.diary] == ["ask", "alloc"]


class StoreConnector:
    """Keeps the K and V of prompts that have ended, outside the engine's pool, and brings them back."""

    def __init__(self, kv_caches: Sequence[tuple[Any, Any]]) -> None:
        self.kv_caches = [cache for layer in kv_caches for cache in layer]  # each [N, B, Hkv, D]
        self.store: dict[tuple[int, ...], list[np.ndarray]] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        known = tuple(request.all_token_ids) in self.store
        return request.num_tokens - 1 - num_computed_tokens if known else 0

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            for cache, saved in zip(self.kv_caches, self.store[tuple(request.all_token_ids)], strict=True):
                for block, content in zip(block_ids, saved, strict=False):
                    np.asarray(cache)[block] = content

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> None:
        prompt = tuple(request.all_token_ids[: request.num_prompt_tokens])
        self.store[prompt] = [np.asarray(cache)[list(block_ids)].copy() for cache in self.kv_caches]


def test_k_and_v_from_a_connector_are_not_computed_again_and_give_the_same_tokens(
    tmp_path: Path, tier_name: str
) -> None:
    model = str(make_tiny_llama(tmp_path))
    args = EngineArgs(model=model, block_size=BLOCK_SIZE, enable_prefix_caching=False, trace=True)
    engine = LLMEngine.from_engine_args(args, load_tier(tier_name))
    core: Any = engine.engine_core
    core.scheduler.kv_connector = StoreConnector(core.executor.model_runner.kv_caches)

    def generate(request_id: str) -> RequestOutput:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        engine.add_request(request_id, list(range(10, 29)), params)
        outputs: list[RequestOutput] = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        return outputs[-1]

    first, second = generate("first"), generate("second")
    steps = [trace.num_scheduled_tokens for trace in core.traces]
    assert steps[0] == {"first": 19}
    assert steps[6] == {"second": 1}, "18 of the 19 tokens came from the store"
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 18)
