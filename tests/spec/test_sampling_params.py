"""Ranges of the parameters are vLLM's, and what is outside is refused with the parameter's name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.workload import parse_sampling_params


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": 0}, {"min_p": 1}, {"repetition_penalty": 1e-300}, {"repetition_penalty": 1e300},
        {"presence_penalty": -2}, {"presence_penalty": 2}, {"frequency_penalty": -2}, {"frequency_penalty": 2},
        {"logit_bias": {}}, {"logit_bias": {3: -100, 4: 0.5}}, {"allowed_token_ids": [1]}, {"bad_words": []},
        {"bad_words": ["a", " b"]}, {"min_tokens": 16, "max_tokens": 16}, {"min_tokens": 99, "max_tokens": None},
        {"temperature": 999999}, {"top_k": -1},
    ],
)  # fmt: skip
def test_the_borders_of_every_range_are_accepted(params: dict[str, Any]) -> None:
    for name, value in params.items():
        given = getattr(SamplingParams(**params), name)
        assert given == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": -0.1}, {"min_p": 1.1}, {"min_p": float("nan")}, {"min_p": "0.1"}, {"min_p": True},
        {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"repetition_penalty": float("inf")},
        {"presence_penalty": 2.1}, {"presence_penalty": -2.1}, {"presence_penalty": None},
        {"frequency_penalty": 2.1}, {"frequency_penalty": -2.1}, {"frequency_penalty": float("nan")},
        {"logit_bias": [1]}, {"logit_bias": {"x": 1}}, {"logit_bias": {1.5: 1}}, {"logit_bias": {1: "a"}},
        {"logit_bias": {1: float("nan")}}, {"allowed_token_ids": []}, {"allowed_token_ids": ["1"]},
        {"allowed_token_ids": 5}, {"bad_words": "word"}, {"bad_words": [""]}, {"bad_words": [" "]},
        {"bad_words": [3]}, {"min_tokens": -1}, {"min_tokens": 17}, {"min_tokens": 1.0},
        {"top_p": -1}, {"top_p": 0}, {"top_k": -2}, {"temperature": -1}, {"max_tokens": 0},
    ],
)  # fmt: skip
def test_b53_a_value_out_of_range_is_refused_with_the_name_of_its_parameter(params: dict[str, Any]) -> None:
    (name,) = params
    with pytest.raises(ValueError, match=rf"^[^\n]*{name}[^\n]*\.$"):
        SamplingParams(**params)


def test_b29_min_tokens_above_max_tokens_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"min_tokens must be at most max_tokens \(4\), got 5\."):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_12678_a_field_that_does_not_exist_is_refused_and_not_ignored() -> None:
    with pytest.raises(ValueError, match="unknown sampling parameter 'length_penalty'"):
        parse_sampling_params({"length_penalty": 1.0})
    with pytest.raises(TypeError, match="length_penalty"):
        SamplingParams(length_penalty=1.0)  # type: ignore[call-arg]


def test_a_bias_keeps_vllms_range_and_takes_the_text_keys_of_json() -> None:
    params = parse_sampling_params(json.loads('{"logit_bias": {"5": 1000, "6": -1e9, "7": 1}}'))
    assert params.logit_bias == {5: 100.0, 6: -100.0, 7: 1.0}


def test_the_parameters_do_not_change_with_the_callers_table() -> None:
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 2.0
    assert params.logit_bias == {1: 1.0}
    assert hash(params) == hash(SamplingParams(logit_bias={1: 1.0}))


def test_resolving_adds_what_the_model_knows_and_leaves_the_original_alone() -> None:
    params = SamplingParams(stop_token_ids=[7], bad_words=["x"])
    resolved = params.resolved([1, 2], [[5, 6]])
    assert (resolved.all_stop_token_ids, resolved.bad_words_token_ids) == ({1, 2, 7}, ((5, 6),))
    assert (params.all_stop_token_ids, params.bad_words_token_ids) == ({7}, ())
    assert resolved == params


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"min_tokens": 1},
        {"allowed_token_ids": [1]}, {"logit_bias": {1: 1}},
    ],
)  # fmt: skip
def test_only_rows_with_a_rule_are_processed(params: dict[str, Any]) -> None:
    assert SamplingParams(**params).changes_logits
    plain = SamplingParams(temperature=0.5, top_p=0.5, top_k=5, min_p=0.5, stop_token_ids=[1], stop=["a"])
    assert not plain.changes_logits
    assert SamplingParams(bad_words=["a"]).resolved([], [[1]]).changes_logits
