"""Prompts that come as vectors: they behave as the tokens whose embedding they are, on both tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reference.contracts.block_hash import extra_keys, hash_embeds
from reference.contracts.protocols import Tier
from reference.contracts.request import EngineCoreRequest, Request
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from reference.frontend.checkpoint import load_checkpoint
from reference.frontend.engine_args import EngineArgs
from reference.frontend.input_processor import InputProcessor
from reference.frontend.llm import LLM
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.outputs import RequestOutput
from reference.frontend.tiers import load_tier
from tests.scripted import byte_tokenizer, make_scripted_config
from tests.tiny_models import make_tiny_llama, make_tiny_model

PROMPT = list(range(10, 29))  # 19 tokens
EMBEDDINGS = {"LlamaForCausalLM": "model.embed_tokens.weight", "GPT2LMHeadModel": "transformer.wte.weight"}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "ignore_eos": True}

Prompt = list[int] | dict[str, Any]


@pytest.fixture(scope="module", params=EMBEDDINGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


def embed(folder: Path, token_ids: list[int]) -> np.ndarray:
    """The model's own embedding of tokens: [P, C]."""
    checkpoint = load_checkpoint(folder)
    return checkpoint.tensor(EMBEDDINGS[checkpoint.config.architecture])[token_ids]


def run(
    folder: Path, tier: Tier, prompts: dict[str, Prompt], params: SamplingParams, **options: Any
) -> tuple[dict[str, RequestOutput], list[SchedulerOutput]]:
    schedules: list[SchedulerOutput] = []

    def keep(schedule: SchedulerOutput, _: ModelRunnerOutput) -> None:
        schedules.append(schedule)

    engine = LLMEngine.from_engine_args(EngineArgs(model=str(folder), **options), tier, keep)
    for request_id, prompt in prompts.items():
        engine.add_request(request_id, prompt, params)
    finished = {}
    while engine.has_unfinished_requests():
        finished.update({output.request_id: output for output in engine.step() if output.finished})
    return finished, schedules


def tokens_of(outputs: dict[str, RequestOutput]) -> dict[str, list[list[int]]]:
    return {name: [c.token_ids for c in output.outputs] for name, output in outputs.items()}


SITUATIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "chunked": {"max_num_batched_tokens": 4},
    "preempted": {"block_size": 4, "num_blocks": 15},
    "chunked and preempted": {"block_size": 4, "num_blocks": 15, "max_num_batched_tokens": 5},
    "without a cache": {"enable_prefix_caching": False, "block_size": 4, "num_blocks": 15},
    "siblings without a slot": {"max_num_seqs": 2, "n": 3},
    "siblings, preempted": {"block_size": 4, "num_blocks": 12, "n": 3},
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_models_own_embedding_gives_the_tokens_of_the_token_prompt(
    folder: Path, tier: Tier, situation: str
) -> None:
    """Two requests of vectors and one of tokens run side by side, as do their three twins of tokens."""
    options = dict(SITUATIONS[situation])
    params = SamplingParams(**SAMPLED, n=options.pop("n", 1))
    prompts: dict[str, Prompt] = {"a": PROMPT, "b": PROMPT[::-1], "c": PROMPT[3:12]}
    expected, _ = run(folder, tier, prompts, params, **options)
    given: dict[str, Prompt] = {name: {"prompt_embeds": embed(folder, prompts[name])} for name in "ab"}  # type: ignore[arg-type]
    actual, schedules = run(folder, tier, given | {"c": PROMPT[3:12]}, params, **options)
    assert tokens_of(actual) == tokens_of(expected)
    assert len({tuple(c.token_ids) for output in actual.values() for c in output.outputs}) == 3 * params.n
    if "preempted" in situation:
        resumed = [
            new
            for schedule in schedules
            for new in schedule.scheduled_new_reqs
            if new.prompt_embeds is not None
        ]
        assert len({new.request_id for new in resumed}) < len(resumed)
        assert all(new.prompt_embeds.shape == (19, 64) for new in resumed)  # type: ignore[union-attr]


def test_both_tiers_make_the_same_of_vectors_that_are_no_tokens(folder: Path) -> None:
    vectors = np.random.default_rng(0).normal(0, embed(folder, PROMPT).std(), (19, 64))
    params = SamplingParams(**SAMPLED)
    results = [
        tokens_of(run(folder, load_tier(name), {"a": {"prompt_embeds": vectors}}, params)[0])
        for name in ("reference", "fast")
    ]
    assert results[0] == results[1]
    shifted = {"a": {"prompt_embeds": vectors[::-1]}}
    assert tokens_of(run(folder, load_tier("fast"), shifted, params)[0]) != results[1]  # they are read


def test_equal_vectors_hit_the_cache_and_others_never_do(llama: Path, tier: Tier) -> None:
    llm = LLM(tier, llama, block_size=4)
    vectors = embed(llama, PROMPT)
    other_end = vectors.copy()
    other_end[-1, 0] += 1  # the blocks before it are equal, but the digest is of the whole prompt

    def num_cached(prompt: Any) -> int:
        return llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)[0].num_cached_tokens

    assert num_cached({"prompt_embeds": vectors}) == 0
    assert num_cached({"prompt_embeds": vectors.copy()}) == 16
    assert num_cached({"prompt_embeds": other_end}) == 0
    assert num_cached({"prompt_embeds": vectors[:18]}) == 0
    assert num_cached([0] * 19) == 0, "the ids that hold the places are no tokens"
    assert num_cached(PROMPT) == 0
    assert num_cached({"prompt_embeds": vectors, "cache_salt": "s"}) == 0
    assert num_cached({"prompt_embeds": torch.from_numpy(vectors.copy())}) == 16


def test_generated_tokens_behind_vectors_are_found_again_after_a_preemption(llama: Path, tier: Tier) -> None:
    prompts: dict[str, Prompt] = {name: {"prompt_embeds": embed(llama, PROMPT)} for name in "ab"}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs, schedules = run(llama, tier, prompts, params, block_size=4, num_blocks=15)
    resumed = [new for s in schedules for new in s.scheduled_new_reqs if len(new.token_ids) > 19]
    assert resumed
    assert max(new.num_computed_tokens for new in resumed) > 16
    assert outputs["a"].outputs[0].token_ids == outputs["b"].outputs[0].token_ids


def test_penalties_do_not_see_the_ids_that_hold_the_places(llama: Path, tier: Tier) -> None:
    """Token 0 is far ahead by its bias. A prompt of token 0 makes it fall far behind; vectors do not."""
    params = SamplingParams(
        temperature=0, max_tokens=1, logit_bias={0: 100}, repetition_penalty=1e6, ignore_eos=True
    )
    outputs, _ = run(
        llama, tier, {"vectors": {"prompt_embeds": embed(llama, [0] * 5)}, "tokens": [0] * 5}, params
    )
    assert outputs["vectors"].outputs[0].token_ids == [0]
    assert outputs["tokens"].outputs[0].token_ids != [0]


def test_the_output_names_no_prompt_tokens_but_counts_them(llama: Path, tier: Tier) -> None:
    prompt: Prompt = {"prompt_embeds": embed(llama, PROMPT), "prompt": "for display"}
    output = run(llama, tier, {"a": prompt}, SamplingParams(max_tokens=1))[0]["a"]
    assert output.prompt_token_ids == []
    assert output.prompt == "for display"
    assert output.metrics.num_prompt_tokens == 19


def test_what_the_caller_does_with_the_array_afterwards_does_not_count(llama: Path, tier: Tier) -> None:
    expected = run(llama, tier, {"a": PROMPT}, SamplingParams(**SAMPLED))[0]
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(llama)), tier)
    vectors = embed(llama, PROMPT)
    engine.add_request("a", {"prompt_embeds": vectors}, SamplingParams(**SAMPLED))
    vectors[:] = 0
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert tokens_of({"a": outputs[-1]}) == tokens_of(expected)


class OnlyDlpack:
    """Another library's array, without `__array__`."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


ARRAYS = {
    "float32": lambda a: a,
    "float64": lambda a: a.astype(np.float64),
    "Fortran order": np.asfortranarray,
    "every second row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "dlpack": OnlyDlpack,
    "torch": torch.from_numpy,
    "torch float64": lambda a: torch.from_numpy(a).double(),
    "torch with a gradient": lambda a: torch.nn.Parameter(torch.from_numpy(a)),
    "torch, turned": lambda a: torch.from_numpy(np.ascontiguousarray(a.T)).T,
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_any_array_is_accepted(llama: Path, tier: Tier, kind: str) -> None:
    prompts: dict[str, Prompt] = {"a": {"prompt_embeds": ARRAYS[kind](embed(llama, PROMPT))}}
    expected = run(llama, tier, {"a": PROMPT}, SamplingParams(**SAMPLED))[0]
    assert tokens_of(run(llama, tier, prompts, SamplingParams(**SAMPLED))[0]) == tokens_of(expected)


def process(prompt: dict[str, Any], **params: Any) -> EngineCoreRequest:
    processor = InputProcessor(make_scripted_config(max_model_len=20), byte_tokenizer())  # hidden size 8
    return processor.process("a", prompt, SamplingParams(**params), arrival_number=0)[0]


def test_the_engine_core_gets_float32_in_rows_and_ids_that_hold_the_places() -> None:
    request = process({"prompt_embeds": np.ones((3, 8), np.float16)})
    assert request.prompt_embeds is not None
    assert (request.prompt_embeds.dtype, request.prompt_embeds.flags.c_contiguous) == (np.float32, True)
    assert request.prompt_token_ids == (0, 0, 0)
    assert process({"prompt_embeds": None, "prompt_token_ids": [5]}).prompt_embeds is None


REFUSED: dict[str, tuple[Any, str]] = {
    "a list": ([[0.0] * 8], "must be an array"),
    "text": ("vectors", "must be an array"),
    "whole numbers": (np.ones((2, 8), np.int64), "int64"),
    "complex numbers": (np.ones((2, 8), np.complex64), "complex64"),
    "objects": (np.full((2, 8), None), "object"),
    "another hidden size": (np.ones((2, 9)), r"\[tokens, 8\].*\[2, 9\]"),
    "one vector": (np.ones(8), r"\[tokens, 8\].*\[8\]"),
    "a batch": (np.ones((1, 2, 8)), r"\[1, 2, 8\]"),
    "no vector": (np.ones((0, 8)), "empty"),
    "NaN": (np.full((2, 8), np.nan), "finite"),
    "infinity": (np.full((2, 8), np.inf, np.float32), "finite"),
    "beyond float32": (np.full((2, 8), 1e300), "finite"),
    "too many": (np.ones((20, 8)), "The prompt has 20 tokens, but max_model_len is 20"),
    "bfloat16": (torch.ones((2, 8), dtype=torch.bfloat16), "cannot be read.*pass a float32 array"),
    "not in memory": (torch.ones((2, 8), device="meta"), "cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_anything_else_is_refused_with_one_sentence(case: str) -> None:
    value, reason = REFUSED[case]
    with pytest.raises(ValueError, match=rf"^[^\n]*{reason}[^\n]*\.$"):
        process({"prompt_embeds": value})


def test_it_excludes_token_ids_and_prompt_logprobs() -> None:
    vectors = np.ones((2, 8))
    with pytest.raises(ValueError, match="not both"):
        process({"prompt_embeds": vectors, "prompt_token_ids": [5]})
    with pytest.raises(ValueError, match="prompt_logprobs needs a prompt of tokens"):
        process({"prompt_embeds": vectors}, prompt_logprobs=0)
    assert process({"prompt_embeds": vectors}, logprobs=0).sampling_params.logprobs == 0


def test_the_digest_is_of_shape_and_bytes_and_enters_the_first_block() -> None:
    vectors = np.arange(16, dtype=np.float32).reshape(2, 8)
    assert hash_embeds(vectors) == hash_embeds(vectors.copy())
    assert hash_embeds(vectors) != hash_embeds(vectors.reshape(4, 4))
    assert hash_embeds(vectors) != hash_embeds(vectors + 1)
    assert extra_keys(0, "x", "y") == (("salt", "x"), ("embeds", "y"))
    assert extra_keys(0, None, "x") != extra_keys(0, "x", None)
    assert extra_keys(1, "x", "y") == ()


def test_a_sibling_has_its_parents_vectors_and_digest() -> None:
    request = Request.from_engine_core_request(process({"prompt_embeds": np.ones((2, 8))}, n=2))
    request.all_token_ids.append(5)
    sibling = request.fork(1)
    assert sibling.prompt_embeds is request.prompt_embeds
    assert sibling.embeds_digest == request.embeds_digest is not None
    assert Request.from_engine_core_request(process({"prompt_token_ids": [5]})).embeds_digest is None
