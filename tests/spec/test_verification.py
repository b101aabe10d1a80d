"""What the runner makes of drafts: behaviour 63, and losslessness under every sampling rule, on both tiers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reference.contracts.protocols import Tier
from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import NewRequestData, SchedulerOutput
from tests.differential.test_model_runner import MODEL, RandomCheckpoint, prompt
from tests.speculation import (
    LoopRequest,
    RightUntil,
    RunnerLoop,
    always_right,
    always_wrong,
    generate,
    make_config,
)

CHECKPOINT = RandomCheckpoint(MODEL)
NUM_TOKENS = 24
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {"temperature": 1.0},
    "truncated": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.8, "repetition_penalty": 1.5, "presence_penalty": 0.8, "frequency_penalty": 0.9,
    },
    "greedy penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 1.5},
    "bias": {"temperature": 1.0, "logit_bias": {7: 4.0, 9: -3.0}},
    "allowed": {"temperature": 1.2, "allowed_token_ids": list(range(20, 60))},
}  # fmt: skip


def requests(**changes: Any) -> list[LoopRequest]:
    """One for each kind of parameters, of different lengths."""
    return [
        LoopRequest(
            name, prompt(5 + i, seed=i), SamplingParams(max_tokens=NUM_TOKENS, **params, **changes), i
        )
        for i, (name, params) in enumerate(PARAMS.items())
    ]


def batches(**changes: Any) -> list[list[LoopRequest]]:
    """Two batches: a runner has six rows."""
    everyone = requests(**changes)
    return [everyone[:4], everyone[4:]]


@pytest.mark.parametrize("k", [1, 3, 10])
def test_drafts_that_are_right_are_all_accepted_and_each_step_gives_one_token_more(
    tier: Tier, k: int
) -> None:
    for batch in batches():
        cold = generate(tier, CHECKPOINT, batch)
        loop = generate(tier, CHECKPOINT, batch, k, always_right(cold.outputs))
        assert loop.outputs == cold.outputs
        for steps in loop.accepted.values():
            assert steps
            assert all(drafts == accepted for drafts, accepted in steps)
        assert loop.num_steps == 1 + -(-(NUM_TOKENS - 1) // (k + 1))


@pytest.mark.parametrize("k", [1, 3, 10])
def test_drafts_that_are_wrong_are_all_rejected_and_leave_nothing_behind(tier: Tier, k: int) -> None:
    for batch in batches():
        cold = generate(tier, CHECKPOINT, batch)
        loop = generate(tier, CHECKPOINT, batch, k, always_wrong(cold.outputs))
        assert loop.outputs == cold.outputs
        assert {accepted for steps in loop.accepted.values() for _, accepted in steps} == {0}
        assert loop.num_steps == NUM_TOKENS


@pytest.mark.parametrize("num_right", [1, 2, 4])
def test_the_first_wrong_draft_cuts_the_run(tier: Tier, num_right: int) -> None:
    for batch in batches():
        cold = generate(tier, CHECKPOINT, batch)
        loop = generate(tier, CHECKPOINT, batch, 5, RightUntil(cold.outputs, num_right))
        assert loop.outputs == cold.outputs
        for steps in loop.accepted.values():
            assert all(accepted == min(drafts, num_right) for drafts, accepted in steps)


def test_requests_with_and_without_drafts_share_a_batch(tier: Tier) -> None:
    batch = requests()[:5]
    cold = generate(tier, CHECKPOINT, batch)

    class OnlySome(RightUntil):
        def propose(self, requests: Any) -> dict[str, list[int]]:
            drafts = super().propose(requests)
            return {name: ids for name, ids in drafts.items() if name in ("plain", "penalties")}

    loop = generate(tier, CHECKPOINT, batch, 4, OnlySome(cold.outputs, 2))
    assert loop.outputs == cold.outputs
    assert {name for name, steps in loop.accepted.items() if steps} == {"plain", "penalties"}


@pytest.mark.parametrize("num_right", [0, 2, 9])
def test_min_tokens_and_bad_words_see_the_drafts_as_output(tier: Tier, num_right: int) -> None:
    """A mask on the row behind a draft depends on that draft: the tail of a bad word, and the count of tokens."""
    free = generate(
        tier, CHECKPOINT, [LoopRequest("a", prompt(6), SamplingParams(temperature=0, max_tokens=12))]
    )
    tokens = free.outputs["a"]
    # Forbidden is what would come at positions 5 and 8, each behind the token before it.
    words = [tokens[4:6], tokens[7:9]]
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=7, stop_token_ids=[tokens[2]])
    batch = [LoopRequest("a", prompt(6), params.resolved((), words))]
    cold = generate(tier, CHECKPOINT, batch)
    assert cold.outputs["a"][2] != tokens[2]
    assert tokens[2] not in cold.outputs["a"][:7]
    loop = generate(tier, CHECKPOINT, batch, 6, RightUntil(cold.outputs, num_right))
    assert loop.outputs == cold.outputs


def test_logprobs_have_one_entry_an_output_token_and_are_those_without_drafts(tier: Tier) -> None:
    for batch in batches(logprobs=3):
        cold = generate(tier, CHECKPOINT, batch)
        loop = generate(tier, CHECKPOINT, batch, 4, RightUntil(cold.outputs, 2))
        for name, expected in cold.logprobs.items():
            assert len(expected) == NUM_TOKENS
            assert [[(t.token_id, t.rank) for t in entry] for entry in loop.logprobs[name]] == [
                [(t.token_id, t.rank) for t in entry] for entry in expected
            ]
            # float32 sums of the same row in batches of another shape
            np.testing.assert_allclose(
                [entry[0].logprob for entry in loop.logprobs[name]],
                [entry[0].logprob for entry in expected],
                rtol=0,
                atol=1e-4,
            )


def test_kept_logits_have_a_row_for_each_sampled_token(tier: Tier) -> None:
    batch = requests()[:3]
    cold = generate(tier, CHECKPOINT, batch)
    config = make_config(CHECKPOINT, 4, keep_logits=True)
    runner: Any = tier.make_model_runner(config, CHECKPOINT)
    runner.speculator = RightUntil(cold.outputs, 2)
    execute, shapes = runner.execute, []

    def observed(schedule: Any) -> Any:
        output = execute(schedule)
        for name, ids in output.sampled_token_ids.items():
            rows = output.logits[name]
            shapes.append(rows.shape == (len(ids), MODEL.vocab_size))
            if name == "greedy":
                assert rows.argmax(axis=1).tolist() == ids
        return output

    runner.execute = observed
    assert RunnerLoop(runner, config, batch).run().outputs == cold.outputs
    assert shapes
    assert all(shapes)


def break_rows(runner: Any, is_broken: Any) -> None:
    """Turn rows of logits to NaN; `is_broken` gets the number of rows and answers with their indices.

    Logits are kept: else the fast tier takes the best token of a greedy row without writing them.
    """
    runner.config = replace(runner.config, keep_logits=True)
    compute = runner.model.compute_logits

    def broken(hidden: Any) -> Any:
        logits = compute(hidden)
        for row in is_broken(len(logits)):
            logits[row] = float("nan")
        return logits

    runner.model.compute_logits = broken


def test_a_row_of_nan_behind_a_rejected_draft_does_no_harm(tier: Tier) -> None:
    batch = requests()[:1]
    cold = generate(tier, CHECKPOINT, batch)
    config = make_config(CHECKPOINT, 3)
    runner: Any = tier.make_model_runner(config, CHECKPOINT)
    runner.speculator = always_wrong(cold.outputs)
    break_rows(runner, lambda num_rows: range(1, num_rows))
    loop = RunnerLoop(runner, config, batch).run()
    assert (loop.outputs, loop.errors) == (cold.outputs, {})


def test_a_row_of_nan_behind_accepted_drafts_ends_the_request_where_it_would_end_without_drafts(
    tier: Tier,
) -> None:
    """The tokens before it are kept; the next step draws from the broken row first."""
    batch = requests()[:1]
    cold = generate(tier, CHECKPOINT, batch)
    config = make_config(CHECKPOINT, 3)
    runner: Any = tier.make_model_runner(config, CHECKPOINT)
    runner.speculator = always_right(cold.outputs)
    calls = []

    def third_row_then_first(num_rows: int) -> list[int]:
        calls.append(num_rows)
        return {2: [2], 3: [0]}.get(len(calls), [])

    break_rows(runner, third_row_then_first)
    loop = RunnerLoop(runner, config, batch).run()
    assert loop.outputs["greedy"] == cold.outputs["greedy"][:3]  # one, and two of the verification
    assert "NaN" in loop.errors["greedy"]


def test_masks_that_leave_no_token_behind_an_accepted_draft_are_an_error_there(tier: Tier) -> None:
    """Allowed are 40 and 41; no 41 may follow 40 and no 40 may follow it either."""
    params = SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=[40, 41], logit_bias={40: 50})
    words = [[41, 40], [40, 41], [40, 40]]
    batch = [
        LoopRequest("a", prompt(5), params.resolved((), words)),
        LoopRequest("b", prompt(6), SamplingParams(temperature=0, max_tokens=6)),
    ]
    cold = generate(tier, CHECKPOINT, batch)
    assert cold.outputs["a"] == [40]
    assert "left no token" in cold.errors["a"]
    answers = {"a": [40, 40, 40, 40], "b": cold.outputs["b"]}
    loop = generate(tier, CHECKPOINT, batch, 3, always_right(answers))
    assert (loop.outputs, loop.errors) == (cold.outputs, cold.errors)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(tier: Tier) -> None:
    def outputs(seed: int) -> list[int]:
        batch = [LoopRequest("a", prompt(8), SamplingParams(temperature=1.5, max_tokens=20), seed)]
        return generate(tier, CHECKPOINT, batch, 3).outputs["a"]

    assert outputs(1) == outputs(1)
    assert outputs(1) != outputs(2)


def test_many_draws_behind_an_accepted_draft_approach_the_distribution_of_the_model(tier: Tier) -> None:
    """Over 600 seeds, the share of each of the likeliest tokens is its probability, within four standard errors."""
    context = prompt(7)
    bias = {11: 100.0, 12: 100.0}  # the draft, 11 or 12, is accepted in about half of the draws
    first = SamplingParams(temperature=8.0, max_tokens=2, allowed_token_ids=[11, 12, 13, 14], logit_bias=bias)
    num_seeds, drawn, accepted = 600, Counter[tuple[int, ...]](), 0
    cold = Counter[tuple[int, ...]]()
    config = make_config(CHECKPOINT, 1)
    for start in range(0, num_seeds, 6):
        batch = [LoopRequest(str(s), context, first, s) for s in range(start, start + 6)]
        cold.update(tuple(ids) for ids in generate(tier, CHECKPOINT, batch).outputs.values())
        three = replace(first, max_tokens=3)
        batch = [replace(request, params=three) for request in batch]
        runner: Any = tier.make_model_runner(config, CHECKPOINT)
        runner.speculator = RightUntil({str(s): [11] * 3 for s in range(num_seeds)}, 9)
        loop = RunnerLoop(runner, config, batch).run()
        drawn.update(tuple(ids[:2]) for ids in loop.outputs.values())
        accepted += sum(n for steps in loop.accepted.values() for _, n in steps)
    assert 100 < accepted < 500
    assert drawn == cold
    probability = _pair_probabilities(tier, context, first)
    for pair, count in drawn.items():
        error = np.sqrt(probability[pair] * (1 - probability[pair]) / num_seeds)
        assert abs(count / num_seeds - probability[pair]) < 4 * error + 1e-9


def _pair_probabilities(
    tier: Tier, context: list[int], params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """Probability of each pair of tokens, from the logits the model gives."""
    allowed = list(params.allowed_token_ids or ())

    def distribution(tokens: list[int]) -> dict[int, float]:
        config = make_config(CHECKPOINT, keep_logits=True)
        runner = tier.make_model_runner(config, CHECKPOINT)
        execute, rows = runner.execute, []

        def observed(schedule: Any) -> Any:
            output = execute(schedule)
            rows.extend((output.logits or {}).values())
            return output

        runner.execute = observed  # type: ignore[method-assign]
        one = SamplingParams(temperature=0, max_tokens=1)
        RunnerLoop(runner, config, [LoopRequest("p", tokens, one)]).run()
        z = np.array([float(rows[0][0][t]) + params.logit_bias.get(t, 0.0) for t in allowed])
        weights = np.exp((z - z.max()) / params.temperature)
        return dict(zip(allowed, weights / weights.sum(), strict=True))

    return {
        (a, b): p * q
        for a, p in distribution(context).items()
        for b, q in distribution([*context, a]).items()
    }


def test_no_drafts_are_asked_for_where_none_can_be_of_use(tier: Tier) -> None:
    """With two tokens to come one draft; with one to come none; none behind a token that ends the request."""
    cold = generate(tier, CHECKPOINT, requests()[:3])
    speculator = always_wrong(cold.outputs)
    generate(tier, CHECKPOINT, requests()[:3], 4, speculator)
    limits = [[request.max_num_drafts for request in asked] for asked in speculator.asked]
    assert limits[:2] == [[4, 4, 4]] * 2
    assert limits[-4:] == [[2, 2, 2], [1, 1, 1], [], []]

    stop = cold.outputs["greedy"][5]
    stopping = [
        replace(requests()[0], params=SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop]))
    ]
    speculator = always_wrong(cold.outputs)
    loop = generate(tier, CHECKPOINT, stopping, 4, speculator)
    assert loop.outputs["greedy"][-1] == stop
    assert speculator.asked[-1] == []


def test_an_ignored_end_of_sequence_does_not_end_the_guessing(tier: Tier) -> None:
    cold = generate(tier, CHECKPOINT, requests()[:1])
    eos = cold.outputs["greedy"][3]
    for ignore_eos in (True, False):
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=ignore_eos).resolved([eos], [])
        speculator = always_wrong(cold.outputs)
        loop = generate(tier, CHECKPOINT, [replace(requests()[0], params=params)], 4, speculator)
        assert len(loop.outputs["greedy"]) == (24 if ignore_eos else cold.outputs["greedy"].index(eos) + 1)
        assert bool(speculator.asked[cold.outputs["greedy"].index(eos)]) == ignore_eos


def test_drafts_never_reach_beyond_the_longest_sequence_that_can_exist(tier: Tier) -> None:
    """B31, seen from the runner: 20 tokens fit, 12 are the prompt's."""
    batch = [LoopRequest("a", prompt(12), SamplingParams(temperature=0, max_tokens=8))]
    cold = generate(tier, CHECKPOINT, batch, max_model_len=20)
    speculator = always_right(cold.outputs)
    unlimited = [replace(batch[0], params=SamplingParams(temperature=0, max_tokens=None))]
    loop = generate(tier, CHECKPOINT, unlimited, 10, speculator, max_model_len=20)
    assert loop.outputs == cold.outputs
    assert loop.num_steps == 2
    for asked in speculator.asked:
        for request in asked:
            assert request.max_num_drafts <= 20 - len(request.token_ids) - 1


def test_the_runner_tells_the_speculator_who_is_gone(tier: Tier) -> None:
    cold = generate(tier, CHECKPOINT, requests()[:2])
    speculator = always_right(cold.outputs)
    batch = [*requests()[:1], replace(requests()[1], params=SamplingParams(temperature=1.0, max_tokens=3))]
    generate(tier, CHECKPOINT, batch, 2, speculator)
    assert speculator.forgotten == ["plain"]


def test_nobody_guesses_for_a_prompt_that_came_as_embeddings(tier: Tier) -> None:
    """Its token ids are all 0: there is nothing to search, and nothing that a draft model could read."""
    config = make_config(CHECKPOINT, 3)
    runner: Any = tier.make_model_runner(config, CHECKPOINT)
    runner.speculator = speculator = always_wrong({"text": [5] * 9, "embedded": [5] * 9})
    data = [
        NewRequestData(
            name, (7, 8, 9), 3, 0, (block,), SamplingParams(temperature=0), 0, prompt_embeds=embeds
        )
        for name, block, embeds in (
            ("embedded", 1, np.ones((3, MODEL.hidden_size), np.float32)),
            ("text", 2, None),
        )
    ]
    output = runner.execute(SchedulerOutput(0, tuple(data), (), {"embedded": 3, "text": 3}, (), ()))
    assert output.sampled_token_ids.keys() == {"embedded", "text"}
    assert list(output.draft_token_ids) == ["text"]
    assert [request.request_id for request in speculator.asked[0]] == ["text"]
