"""Seeded workloads are the same everywhere and for good: figures of other engines were measured on them."""

from __future__ import annotations

import hashlib
import json

import pytest

from fast.bench.replay import replay
from fast.bench.workloads import CHAT_TURNS, DEFAULT_SIZES, make_workload, prompts_of
from reference.contracts.config import CacheConfig, EngineConfig, SchedulerConfig
from reference.contracts.protocols import Tier
from tests.factories import MODEL


def digest(name: str, size: int) -> str:
    workload = make_workload(name, size)
    content = [[list(r.token_ids), r.max_tokens] for r in workload.requests]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("uniform", 1, "8edfa8849d3d59a8"),
        ("uniform", 8, "6e116d8f84d31720"),
        ("mixed", 32, "91f5bd591245faf6"),
        ("prefix", 32, "e1ea6182ea83fd5e"),
    ],
)
def test_the_tokens_are_those_on_which_the_other_engines_were_first_measured(
    name: str, size: int, expected: str
) -> None:
    assert digest(name, size) == expected


def test_lengths_are_those_that_the_names_promise() -> None:
    def totals(name: str) -> tuple[int, int]:
        workload = make_workload(name)
        return sum(len(r.token_ids) for r in workload.requests), workload.num_output_tokens

    assert totals("uniform") == (64, 64)
    assert totals("mixed") == (4018, 2231)
    assert totals("prefix") == (17029, 512)
    assert totals("long") == (4096, 64)
    prefix = make_workload("prefix", 5).requests
    assert len({r.token_ids[:512] for r in prefix}) == 1
    assert len({r.token_ids[512:] for r in prefix}) == 5


def test_every_turn_of_a_chat_begins_with_all_that_was_said_before() -> None:
    workload = make_workload("chat", 3)
    assert len(workload.waves) == CHAT_TURNS
    said: list[list[int]] = []
    for number, wave in enumerate(workload.waves):
        prompts = prompts_of(wave, said)
        assert len(prompts) == 3
        for prompt, before in zip(prompts, said, strict=bool(number)):
            assert prompt[: len(before)] == before
            assert len(prompt) > len(before)
        said = [[*prompt, 7, 7] for prompt in prompts]


def test_another_round_has_the_same_lengths_and_sharing_in_other_tokens() -> None:
    workload = make_workload("prefix", 4)
    other = workload.with_other_tokens(3, 49152)
    assert [len(r.token_ids) for r in other.requests] == [len(r.token_ids) for r in workload.requests]
    assert len({r.token_ids[:512] for r in other.requests}) == 1
    assert not set(other.requests[0].token_ids[:1]) & {workload.requests[0].token_ids[0]}
    assert all(100 <= token < 49152 for r in other.requests for token in r.token_ids)
    assert workload.with_other_tokens(0, 49152) == workload


@pytest.mark.parametrize("name", DEFAULT_SIZES)
def test_ids_stay_inside_a_small_vocabulary(name: str) -> None:
    workload = make_workload(name, 2, vocab_size=320)
    assert all(100 <= token < 320 for r in workload.requests for token in r.token_ids)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "colour"}, "no workload 'colour'; known are: uniform, mixed, prefix, long, chat"),
        ({"name": "mixed", "size": 0}, "at least 1 request"),
        ({"name": "mixed", "vocab_size": 100}, "more than 100 tokens"),
    ],
)
def test_what_makes_no_workload_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_workload(**options)  # type: ignore[arg-type]


def test_the_replay_counts_tokens_pairs_and_slots_of_every_step(tier: Tier) -> None:
    """64 tokens in, 64 out, 16 a block: one step of 64 tokens, then 63 of one, at 65 to 127 tokens of context."""
    config = EngineConfig(MODEL, CacheConfig(16, 100), SchedulerConfig(max_model_len=1024))
    steps = replay(tier, config, make_workload("uniform"))
    assert [step.num_tokens for step in steps] == [64] + [1] * 63
    assert [step.num_context_tokens for step in steps] == list(range(64, 128))
    assert steps[0].num_pairs == 64 * 65 // 2
    assert [step.num_pairs for step in steps[1:]] == list(range(65, 128))
    assert [step.num_rows for step in steps] == [1] * 64
    assert [step.num_held_tokens for step in steps] == list(range(64, 128))
    assert [step.num_held_slots for step in steps[:3]] == [64, 80, 80]
    assert {step.num_final_tokens for step in steps} == {128}


def test_the_replay_computes_a_shared_prefix_once_and_counts_its_blocks_once(tier: Tier) -> None:
    config = EngineConfig(MODEL, CacheConfig(16, 400), SchedulerConfig(max_model_len=1024))
    workload = make_workload("prefix", 3)
    steps = replay(tier, config, workload)
    own = sum(len(r.token_ids) - 512 for r in workload.requests)
    assert sum(step.num_tokens for step in steps) == 512 + own + 3 * 15
    assert steps[-1].num_running_tokens == sum(len(r.token_ids) + 15 for r in workload.requests)
    assert steps[-1].num_held_tokens == steps[-1].num_running_tokens - 2 * 512


def test_a_request_that_the_engine_cannot_take_is_refused_before_anything_runs(tier: Tier) -> None:
    config = EngineConfig(MODEL, CacheConfig(16, 100), SchedulerConfig(max_model_len=64))
    with pytest.raises(ValueError, match="a request of 128 tokens, and this engine takes at most 64"):
        replay(tier, config, make_workload("uniform"))
