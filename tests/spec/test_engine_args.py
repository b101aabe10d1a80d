"""Options become numbers, or one sentence that says what is wrong with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reference.contracts.config import EngineConfig, ModelConfig
from reference.frontend.engine_args import DEFAULT_KV_CACHE_MEMORY, EngineArgs, describe
from tests.factories import MODEL

# The embedded model's shape: 2 * 30 layers * 3 KV heads * 64 * 4 bytes = 46,080 bytes a token.
SMOLLM = replace(MODEL, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64)
BLOCK_BYTES = 16 * 46_080


def resolve(shape: ModelConfig = SMOLLM, **options: Any) -> EngineConfig:
    return EngineArgs(**options).create_engine_config(shape, "cpu")


def test_the_pool_fills_512_mib_unless_told_otherwise() -> None:
    assert resolve().cache.num_blocks == 512 * 1024**2 // BLOCK_BYTES == 728


def test_the_pool_is_as_large_as_the_memory_given() -> None:
    assert resolve(kv_cache_memory=10 * BLOCK_BYTES).cache.num_blocks == 10
    assert resolve(kv_cache_memory=11 * BLOCK_BYTES - 1).cache.num_blocks == 10
    assert resolve(kv_cache_memory=10 * BLOCK_BYTES, block_size=8).cache.num_blocks == 20


def test_num_blocks_sets_the_pool_directly() -> None:
    assert resolve(num_blocks=7).cache.num_blocks == 7


def test_the_default_pool_of_a_tiny_model_is_no_larger_than_its_requests_can_fill() -> None:
    config = resolve(MODEL, max_num_seqs=4, max_model_len=100, block_size=16)
    assert config.cache.num_blocks == 4 * 7 + 1
    memory = 1000 * 16 * MODEL.kv_bytes_per_token()
    assert resolve(MODEL, max_num_seqs=4, max_model_len=100, kv_cache_memory=memory).cache.num_blocks == 1000


def test_every_option_arrives_in_the_config() -> None:
    config = resolve(
        block_size=32,
        max_num_seqs=3,
        max_num_batched_tokens=500,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=9,
        scheduling_policy="priority",
        num_blocks=5,
        max_model_len=400,
        seed=8,
        trace=True,
        keep_logits=True,
    )
    assert (config.cache.block_size, config.cache.num_blocks, config.cache.enable_prefix_caching) == (
        32,
        5,
        False,
    )
    scheduler = config.scheduler
    assert (scheduler.max_model_len, scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (
        400,
        3,
        500,
    )
    assert (scheduler.enable_chunked_prefill, scheduler.long_prefill_token_threshold) == (False, 9)
    assert scheduler.scheduling_policy == "priority"
    assert (config.seed, config.trace, config.keep_logits) == (8, True, True)


def test_max_model_len_is_the_models_own_unless_given() -> None:
    assert resolve().scheduler.max_model_len == 8192
    assert resolve(max_model_len=2).scheduler.max_model_len == 2


def test_device_auto_is_the_tiers_default_device() -> None:
    assert EngineArgs().create_engine_config(SMOLLM, "the tier's own").device == "the tier's own"
    assert EngineArgs(device="cpu").create_engine_config(SMOLLM, "the tier's own").device == "cpu"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 8193}, ["max_model_len", "8193", "8192"]),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 99, "max_model_len": 100},
            ["max_num_batched_tokens", "99", "100"],
        ),
        ({"num_blocks": 9, "kv_cache_memory": 10**9}, ["num_blocks", "kv_cache_memory"]),
        ({"kv_cache_memory": 2 * BLOCK_BYTES - 1}, ["kv_cache_memory", str(BLOCK_BYTES), "block_size"]),
        ({"num_blocks": 1}, ["num_blocks", "2"]),
        ({"block_size": 0}, ["block_size", "1"]),
        ({"block_size": 16.0}, ["block_size", "integer"]),
        ({"block_size": "16"}, ["block_size", "integer"]),
        ({"max_num_seqs": 0}, ["max_num_seqs"]),
        ({"max_num_seqs": True}, ["max_num_seqs", "integer"]),
        ({"max_num_seqs": None}, ["max_num_seqs", "integer"]),
        ({"max_num_batched_tokens": -1}, ["max_num_batched_tokens"]),
        ({"max_model_len": 1}, ["max_model_len"]),
        ({"long_prefill_token_threshold": -1}, ["long_prefill_token_threshold"]),
        ({"seed": -1}, ["seed"]),
        ({"enable_prefix_caching": "yes"}, ["enable_prefix_caching"]),
        ({"trace": 1}, ["trace"]),
        ({"scheduling_policy": "lifo"}, ["scheduling_policy", "fcfs", "priority"]),
        ({"device": "tpu"}, ["device", "auto", "cpu"]),
        ({"model": ""}, ["model"]),
        ({"model": None}, ["model"]),
    ],
)
def test_a_wrong_option_is_one_sentence_that_names_it(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+\.$") as caught:
        resolve(**options)
    assert all(word in str(caught.value) for word in words), caught.value


def test_without_chunked_prefill_the_longest_prompt_must_fit_into_one_step() -> None:
    config = resolve(enable_chunked_prefill=False, max_num_batched_tokens=100, max_model_len=100)
    assert not config.scheduler.enable_chunked_prefill


def test_the_startup_line_says_blocks_tokens_and_how_many_full_length_requests_fit() -> None:
    line = describe(resolve(num_blocks=101, max_model_len=200))
    assert "100 blocks of 16 tokens = 1600 tokens" in line
    # 13 blocks hold a request of 200 tokens; the pool has 100.
    assert "7.69 requests of 200 tokens" in line
    assert f"({101 * BLOCK_BYTES / 1024**2:.0f} MiB)" in line
    assert DEFAULT_KV_CACHE_MEMORY == 512 * 1024**2


def test_the_host_pool_is_as_large_as_the_pool_unless_told_otherwise() -> None:
    assert resolve(num_blocks=7).cache.num_host_blocks == 0, "nobody swaps"
    assert resolve(num_blocks=7, preemption_mode="swap").cache.num_host_blocks == 6
    config = resolve(num_blocks=7, preemption_mode="swap", swap_space=3 * BLOCK_BYTES + 1)
    assert config.cache.num_host_blocks == 3
    assert config.scheduler.preemption_mode == "swap"


def test_the_cap_on_partial_prefills_arrives_in_the_config() -> None:
    assert resolve().scheduler.max_num_partial_prefills == 0
    assert resolve(max_num_partial_prefills=2).scheduler.max_num_partial_prefills == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preemption_mode": "drop"}, "preemption_mode must be 'recompute' or 'swap', got 'drop'"),
        ({"swap_space": 1024}, "swap_space is the memory for preemption_mode 'swap'"),
        ({"swap_space": -1, "preemption_mode": "swap"}, "swap_space must be at least 0"),
        ({"max_num_partial_prefills": -1}, "max_num_partial_prefills must be at least 0"),
    ],
)
def test_wrong_options_of_preemption_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve(**options)


NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
DRAFT = {"method": "draft_model", "model": "small", "num_speculative_tokens": 3}


def test_without_the_option_nobody_guesses() -> None:
    assert resolve().speculative is None
    assert EngineArgs().draft_model is None


@pytest.mark.parametrize(
    ("keys", "lookup"),
    [
        ({}, (2, 5)),
        ({"prompt_lookup_max": 3}, (2, 3)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_min": 7}, (7, 7)),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 9}, (3, 9)),
        ({"prompt_lookup_min": None, "prompt_lookup_max": None, "model": None}, (2, 5)),
    ],
)
def test_ngram_speculation_has_the_defaults_that_fit_what_was_given(
    keys: dict[str, Any], lookup: tuple[int, int]
) -> None:
    config = resolve(speculative=NGRAM | keys).speculative
    assert config is not None
    assert (config.method, config.num_speculative_tokens) == ("ngram", 4)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == lookup


def test_the_draft_model_has_a_pool_of_its_own_by_the_same_rules() -> None:
    small = replace(SMOLLM, num_hidden_layers=3)  # a tenth of the bytes

    def num_blocks(**keys: Any) -> int:
        args = EngineArgs(speculative=DRAFT | keys, num_blocks=9, max_num_seqs=2, max_model_len=160)
        assert args.draft_model == "small"
        config = args.create_engine_config(SMOLLM, "cpu", small)
        assert config.cache.num_blocks == 9
        assert config.speculative is not None
        assert config.speculative.draft_model is small
        return config.speculative.num_draft_blocks

    assert num_blocks() == 2 * 10 + 1  # two requests of full length
    assert num_blocks(num_blocks=77) == 77
    assert num_blocks(kv_cache_memory=5 * BLOCK_BYTES // 10) == 5


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("ngram", ["must be a table", "'ngram'"]),
        ([], ["must be a table"]),
        ({}, ["method", "'ngram' or 'draft_model'", "None"]),
        (NGRAM | {"method": "eagle"}, ["method", "'eagle'"]),
        (NGRAM | {"method": ["ngram"]}, ["method", "['ngram']"]),
        (NGRAM | {"tokens": 3}, ["'tokens'", "num_speculative_tokens"]),
        ({"method": "ngram"}, ["num_speculative_tokens"]),
        (NGRAM | {"num_speculative_tokens": 0}, ["num_speculative_tokens", "at least 1", "0"]),
        (NGRAM | {"num_speculative_tokens": "4"}, ["num_speculative_tokens", "integer", "'4'"]),
        (NGRAM | {"num_speculative_tokens": True}, ["num_speculative_tokens", "integer"]),
        (NGRAM | {"prompt_lookup_min": 0}, ["prompt_lookup_min", "at least 1"]),
        (NGRAM | {"prompt_lookup_max": 2.5}, ["prompt_lookup_max", "integer"]),
        (NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 3}, ["(4)", "(3)"]),
        (NGRAM | {"model": "small"}, ["model", "'draft_model'", "'ngram'"]),
        (NGRAM | {"num_blocks": 9}, ["num_blocks", "'draft_model'"]),
        (DRAFT | {"prompt_lookup_max": 9}, ["prompt_lookup_max", "'ngram'"]),
        (DRAFT | {"model": None}, ["model", "None"]),
        (DRAFT | {"model": 7}, ["model", "7"]),
        (DRAFT | {"num_blocks": 1}, ["num_blocks", "at least 2"]),
        (DRAFT | {"num_blocks": 9, "kv_cache_memory": 10**9}, ["num_blocks and kv_cache_memory"]),
        (DRAFT | {"kv_cache_memory": 10}, ["kv_cache_memory", "two blocks"]),
    ],
)
def test_a_wrong_speculative_table_is_one_sentence_that_says_what_is_wrong(
    table: Any, words: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+\.$") as caught:
        EngineArgs(speculative=table).create_engine_config(SMOLLM, "cpu", SMOLLM)
    assert all(word in str(caught.value) for word in words), caught.value
