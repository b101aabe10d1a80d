"""The proposers themselves: behaviour 64, and a draft model that keeps up with what it guesses for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import fast.speculator
import reference.speculator
from reference.contracts.config import SpeculativeConfig
from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.speculation import DraftRequest
from tests.differential.test_model_runner import MODEL, RandomCheckpoint, prompt
from tests.speculation import LoopRequest, generate, make_config

SPECULATORS: dict[str, Any] = {"reference": reference.speculator, "fast": fast.speculator}
TARGET = RandomCheckpoint(MODEL)
SMALL = replace(MODEL, hidden_size=32, intermediate_size=48, num_hidden_layers=1, head_dim=8)
DRAFT = RandomCheckpoint(SMALL, seed=7)

GREEDY = SamplingParams(temperature=0)


def draft_request(
    token_ids: Sequence[int],
    limit: int = 4,
    request_id: str = "a",
    params: SamplingParams = GREEDY,
    num_prompt_tokens: int | None = None,
    seed: int = 0,
) -> DraftRequest:
    num_prompt_tokens = len(token_ids) - 1 if num_prompt_tokens is None else num_prompt_tokens
    return DraftRequest(request_id, list(token_ids), num_prompt_tokens, params, seed, limit)


def ngrams(
    tier_name: str, token_ids: Sequence[int], limit: int = 3, shortest: int = 1, longest: int = 3
) -> list[int]:
    config = SpeculativeConfig("ngram", 9, prompt_lookup_min=shortest, prompt_lookup_max=longest)
    proposer = SPECULATORS[tier_name].NgramProposer(config)
    drafts: list[int] = proposer.propose([draft_request(token_ids, limit)]).get("a", [])
    return drafts


def test_what_followed_the_earlier_occurrence_of_the_tail_is_the_guess(tier_name: str) -> None:
    assert ngrams(tier_name, [1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1]


def test_the_longest_tail_is_searched_for_first(tier_name: str) -> None:
    """3 is followed by 9 earlier on, but 2 3 by 4."""
    assert ngrams(tier_name, [3, 9, 9, 2, 3, 4, 5, 6, 2, 3]) == [4, 5, 6]


def test_a_longer_match_later_on_wins_over_a_shorter_one_before(tier_name: str) -> None:
    assert ngrams(tier_name, [2, 3, 7, 1, 2, 3, 8, 8, 1, 2, 3]) == [8, 8, 1]


def test_of_equal_matches_the_earliest_counts(tier_name: str) -> None:
    assert ngrams(tier_name, [1, 2, 7, 7, 1, 2, 8, 8, 1, 2], limit=2) == [7, 7]


def test_a_tail_shorter_than_the_minimum_is_no_match(tier_name: str) -> None:
    token_ids = [1, 2, 3, 9, 9, 4, 3]
    assert ngrams(tier_name, token_ids, shortest=2) == []
    assert ngrams(tier_name, token_ids, shortest=1) == [9, 9, 4]


def test_a_tail_longer_than_the_maximum_is_not_looked_at(tier_name: str) -> None:
    token_ids = [5, 6, 1, 2, 3, 8, 1, 2, 3]
    assert ngrams(tier_name, [4, 2, 3, 7, *token_ids], longest=2) == [7, 5, 6]
    assert ngrams(tier_name, [4, 2, 3, 7, *token_ids], longest=3) == [8, 1, 2]


@pytest.mark.parametrize("token_ids", [[1], [1, 2], [1, 2, 3, 4, 5, 6]])
def test_without_a_match_there_is_no_draft(tier_name: str, token_ids: list[int]) -> None:
    assert ngrams(tier_name, token_ids) == []


def test_a_match_may_overlap_the_tail_and_ends_with_the_sequence(tier_name: str) -> None:
    assert ngrams(tier_name, [7, 7, 7, 7], limit=3) == [7]
    assert ngrams(tier_name, [1, 2, 1, 2, 1, 2], limit=9, longest=2) == [1, 2, 1, 2]


def test_no_more_is_guessed_than_can_be_of_use(tier_name: str) -> None:
    for limit in (1, 2, 3):
        assert len(ngrams(tier_name, [1, 2, 3, 4, 5, 6, 1, 2, 3], limit)) == limit


def test_rows_of_a_batch_are_independent_and_keep_their_order(tier_name: str) -> None:
    proposer = SPECULATORS[tier_name].NgramProposer(SpeculativeConfig("ngram", 9))
    rows = {"z": [1, 2, 3, 1, 2], "none": [1, 2, 3, 4], "a": [2, 1, 9, 2, 1]}
    drafts = proposer.propose([draft_request(ids, request_id=name) for name, ids in rows.items()])
    assert list(drafts.items()) == [("z", [3, 1, 2]), ("a", [9, 2, 1])]
    assert proposer.propose([]) == {}


def test_both_tiers_find_the_same_ngrams_in_random_sequences() -> None:
    rng = np.random.default_rng(0)
    num_found = 0
    for _ in range(400):
        vocabulary, length = rng.integers(2, 8), rng.integers(1, 40)
        shortest = int(rng.integers(1, 4))
        token_ids = rng.integers(0, vocabulary, length).tolist()
        find = partial(
            ngrams, token_ids=token_ids, shortest=shortest, longest=shortest + int(rng.integers(0, 4))
        )
        found = find("reference")
        assert find("fast") == found
        num_found += bool(found)
    assert 200 < num_found < 390


def make_proposer(tier_name: str, draft: RandomCheckpoint = DRAFT, **options: Any) -> Any:
    config = make_config(TARGET, 4, draft, **options)
    return SPECULATORS[tier_name].DraftModelProposer(config, draft)


def answers(tier: Tier, request: LoopRequest, draft: RandomCheckpoint = DRAFT) -> list[int]:
    """What the draft model itself would generate."""
    return generate(tier, draft, [request]).outputs[request.request_id]


SAMPLED = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, max_tokens=12)
PENALISED = SamplingParams(
    temperature=0.9, repetition_penalty=1.4, frequency_penalty=0.6, logit_bias={5: 3}, max_tokens=12
)


@pytest.mark.parametrize(
    "params", [replace(GREEDY, max_tokens=12), SAMPLED, PENALISED], ids=["greedy", "sampled", "rules"]
)
def test_a_draft_model_guesses_what_it_would_say_itself_with_the_requests_own_noise(
    tier: Tier, tier_name: str, params: SamplingParams
) -> None:
    context = prompt(9)
    expected = answers(tier, LoopRequest("a", context, params, seed=3))
    proposer = make_proposer(tier_name)
    for start in (1, 2, 7):
        known = context + expected[:start]
        drafts = proposer.propose([draft_request(known, 4, params=params, num_prompt_tokens=9, seed=3)])
        assert drafts == {"a": expected[start : start + 4]}


def test_tokens_the_draft_model_did_not_foresee_are_caught_up_with(tier: Tier, tier_name: str) -> None:
    """Rejected drafts leave no trace, be it that one, some or all of them were wrong, or that many tokens are new."""
    proposer = make_proposer(tier_name)
    known = prompt(8)
    rng = np.random.default_rng(1)
    for num_kept, num_other in [(0, 1), (2, 1), (4, 1), (3, 0), (1, 1), (0, 9), (4, 6), (3, 1)]:
        (drafts,) = proposer.propose([draft_request(known, 4, num_prompt_tokens=8)]).values()
        cold = make_proposer(tier_name).propose([draft_request(known, 4, num_prompt_tokens=8)])
        assert cold == {"a": drafts}
        others = [int(token) for token in rng.integers(0, MODEL.vocab_size, num_other)]
        known = known + drafts[:num_kept] + (others or [drafts[num_kept]])


def test_only_what_is_new_is_computed(tier_name: str) -> None:
    proposer = make_proposer(tier_name)
    computed: list[int] = []
    execute = proposer.model_runner.execute

    def counted(schedule: Any) -> Any:
        computed.append(schedule.total_num_scheduled_tokens)
        return execute(schedule)

    proposer.model_runner.execute = counted
    known = prompt(8)
    (drafts,) = proposer.propose([draft_request(known, 3)]).values()
    assert computed == [8, 1, 1]  # the last draft is not fed back
    known = known + drafts + [5]  # all accepted, and one more
    computed.clear()
    proposer.propose([draft_request(known, 3)])
    assert computed == [2, 1, 1]
    known = [*known, 6]  # all rejected
    computed.clear()
    proposer.propose([draft_request(known, 2)])
    assert computed == [1, 1]


def test_a_long_catch_up_is_cut_into_steps_of_the_usual_size(tier: Tier, tier_name: str) -> None:
    contexts = {name: prompt(30 + 9 * i, seed=i) for i, name in enumerate("abc")}
    alone = {
        name: make_proposer(tier_name).propose([draft_request(ids, 4, name)])[name]
        for name, ids in contexts.items()
    }
    proposer = make_proposer(tier_name, budget=20)
    sizes: list[int] = []
    execute = proposer.model_runner.execute

    def counted(schedule: Any) -> Any:
        sizes.append(schedule.total_num_scheduled_tokens)
        return execute(schedule)

    proposer.model_runner.execute = counted
    requests = [draft_request(ids, 4, name) for name, ids in contexts.items()]
    assert proposer.propose(requests) == alone
    assert sum(sizes) == sum(map(len, contexts.values())) + 3 * 3
    assert max(sizes) == 20


def test_requests_of_different_limits_share_the_draft_models_batch(tier_name: str) -> None:
    limits = {"a": 1, "b": 4, "c": 2}
    contexts = {name: prompt(5 + 3 * i, seed=i) for i, name in enumerate(limits)}
    alone = {
        name: make_proposer(tier_name).propose([draft_request(contexts[name], limit, name)])[name]
        for name, limit in limits.items()
    }
    together = make_proposer(tier_name).propose(
        [draft_request(contexts[name], limit, name) for name, limit in limits.items()]
    )
    assert together == alone
    assert {name: len(drafts) for name, drafts in together.items()} == limits


def test_a_request_that_finds_no_room_in_the_pool_gets_no_drafts_until_there_is_some(tier_name: str) -> None:
    """Four usable blocks of four tokens: 9 + 3 tokens take three of them, and 6 + 3 need another three."""
    proposer = make_proposer(tier_name, num_draft_blocks=5)
    big, small = draft_request(prompt(9), 4, "big"), draft_request(prompt(6, seed=1), 4, "small")
    assert list(proposer.propose([big, small])) == ["big"]
    assert list(proposer.propose([small, big])) == ["big"]
    proposer.forget(["big", "never seen"])
    drafts = proposer.propose([small])
    assert drafts == make_proposer(tier_name).propose([small])
    proposer.forget(["small"])
    assert proposer.block_pool.get_num_free_blocks() == 4
    proposer.block_pool.check_integrity()


def test_an_id_that_was_forgotten_may_come_back_as_another_request(tier_name: str) -> None:
    proposer = make_proposer(tier_name)
    proposer.propose([draft_request(prompt(9)), draft_request(prompt(5, seed=3), request_id="b")])
    proposer.forget(["a"])
    other = [draft_request(prompt(7, seed=2)), draft_request(prompt(6, seed=4), request_id="c")]
    assert proposer.propose(other) == make_proposer(tier_name).propose(other)


def test_more_requests_come_and_go_than_the_draft_models_batch_has_rows(tier_name: str) -> None:
    proposer = make_proposer(tier_name)
    for start in range(0, 24, 3):
        names = [str(i) for i in range(start, start + 6)]
        requests = [draft_request(prompt(4 + int(name) % 5, seed=int(name)), 2, name) for name in names]
        assert proposer.propose(requests) == make_proposer(tier_name).propose(requests)
        proposer.forget(names[:3])


def test_a_request_beyond_the_draft_models_positions_gets_no_drafts(tier_name: str) -> None:
    short = RandomCheckpoint(replace(SMALL, max_position_embeddings=12), seed=7)
    proposer = make_proposer(tier_name, short)
    assert list(proposer.propose([draft_request(prompt(9), 4)])) == ["a"]
    assert proposer.propose([draft_request(prompt(10), 4)]) == {}


def test_a_draft_model_that_breaks_down_guesses_nothing_and_harms_nobody(tier: Tier) -> None:
    weights = RandomCheckpoint(SMALL)
    broken = weights.weights["model.norm.weight"].copy()
    broken[:] = np.nan
    weights.weights["model.norm.weight"] = broken
    batch = [LoopRequest("a", prompt(6), SamplingParams(temperature=0, max_tokens=8))]
    cold = generate(tier, TARGET, batch)
    loop = generate(tier, TARGET, batch, 3, draft=weights)
    assert (loop.outputs, loop.errors, loop.accepted) == (cold.outputs, {}, {"a": []})


@pytest.mark.parametrize(
    "params",
    [replace(GREEDY, max_tokens=20), replace(SAMPLED, max_tokens=20), replace(PENALISED, max_tokens=20)],
    ids=["greedy", "sampled", "rules"],
)
def test_the_model_as_its_own_draft_model_is_always_right(tier: Tier, params: SamplingParams) -> None:
    batch = [LoopRequest(str(i), prompt(5 + 2 * i, seed=i), params, seed=i) for i in range(4)]
    cold = generate(tier, TARGET, batch)
    loop = generate(tier, TARGET, batch, 3, draft=TARGET)
    assert loop.outputs == cold.outputs
    checks = [check for steps in loop.accepted.values() for check in steps]
    assert checks
    assert all(num_drafts == num_accepted for num_drafts, num_accepted in checks)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_tokens_with_another_draft_model_are_those_without(tier: Tier, k: int) -> None:
    params = SamplingParams(temperature=0.8, top_k=4, max_tokens=20)
    batch = [LoopRequest(str(i), prompt(5 + 2 * i, seed=i), params, seed=i) for i in range(4)]
    cold = generate(tier, TARGET, batch)
    loop = generate(tier, TARGET, batch, k, draft=DRAFT)
    assert loop.outputs == cold.outputs
    assert any(steps for steps in loop.accepted.values())


def test_drafts_of_a_request_that_wants_logprobs_cost_none(
    tier_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = make_proposer(tier_name)
    params = replace(GREEDY, logprobs=5)
    reported = []
    execute = proposer.model_runner.execute

    def observed(schedule: Any) -> Any:
        output = execute(schedule)
        reported.append(output.logprobs)
        return output

    proposer.model_runner.execute = observed
    assert proposer.propose([draft_request(prompt(6), params=params)])
    assert reported
    assert not any(reported)


def test_a_draft_model_of_another_vocabulary_is_refused_with_both_sizes() -> None:
    other = RandomCheckpoint(replace(SMALL, vocab_size=300))
    with pytest.raises(ValueError, match="vocabulary of 300 tokens and the model one of 320"):
        make_config(TARGET, 3, other)
