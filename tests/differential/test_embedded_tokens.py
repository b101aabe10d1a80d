"""Both tiers give the same tokens, block tables and schedule with the real 135M-parameter model.

16 prompts of 48 tokens each. The options are combined pairwise: every two values of two options meet in some run.
"""

from __future__ import annotations

import pytest

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.diff import compare_tiers
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest

pytestmark = pytest.mark.embedded

SYSTEM = (
    "You are a careful assistant who answers every question in one short and true sentence, in plain English."
)
QUESTIONS = (
    "What is the capital of France?",
    "How many legs does a spider have?",
    "Which planet is known as the red planet?",
    "What do bees make?",
    "In which ocean is Hawaii?",
    "Who wrote Romeo and Juliet?",
    "What is 12 times 12?",
    "What colour is the sky on a clear day?",
)
TEXTS = (
    "Once upon a time, in a village at the foot of a mountain, there lived",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "The three laws of thermodynamics state that",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "Ingredients:\n- 200 g flour\n- 2 eggs\n- 1 pinch of salt\n\nMethod:\n",
    "Café, naïve, Zürich, 東京, Привет and 😀 are",
    "In 1969, the first humans landed on the Moon. In 1989,",
)
TIGHT, AMPLE = 40, 400  # blocks of 16 tokens; the 16 requests would like about 110


def make_workload(sampled: bool) -> Workload:
    requests = []
    for i in range(16):
        params = SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.0)
        if sampled:
            # Each kind of draw: unrestricted, top-k, top-p, both; each request with a seed of its own.
            params = SamplingParams(
                max_tokens=48,
                ignore_eos=True,
                temperature=0.8 + 0.1 * (i % 3),
                top_k=(0, 40, 0, 20)[i % 4],
                top_p=(1.0, 1.0, 0.9, 0.95)[i % 4],
                seed=i,
            )
        step = i // 3  # three arrive in each step
        if i % 2:
            requests.append(WorkloadRequest(f"r{i}", prompt=TEXTS[i // 2], arrival_step=step, params=params))
        else:
            messages = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTIONS[i // 2]})
            requests.append(WorkloadRequest(f"r{i}", messages=messages, arrival_step=step, params=params))
    return Workload(tuple(requests))


@pytest.mark.parametrize(
    ("chunk", "sampled", "num_blocks", "caching"),
    [
        (24, False, TIGHT, True),
        (24, True, AMPLE, False),
        (64, False, AMPLE, True),
        (64, True, TIGHT, False),
        (2048, False, AMPLE, False),
        (2048, True, TIGHT, True),
    ],
)
def test_tokens_tables_and_schedule_are_equal(
    chunk: int, sampled: bool, num_blocks: int, caching: bool
) -> None:
    report = compare_tiers(
        (load_tier("reference"), load_tier("fast")),
        "smollm2-135m",
        make_workload(sampled),
        num_blocks=num_blocks,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=caching,
    )
    assert report.divergence is None
    assert report.excused == []
    assert report.num_finished == 16
    assert report.num_tokens == 16 * 48
    assert (report.num_preemptions > 0) == (num_blocks == TIGHT)
    assert (report.num_cached_tokens > 0) == caching
