"""One workload with everything in it, on the real model: the tiers agree, and nothing in it goes untried."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference.frontend.diff import compare_tiers
from reference.frontend.engine_args import DEFAULT_MODEL
from reference.frontend.tiers import load_tier
from reference.frontend.workload import read_workload

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "everything.jsonl"


@pytest.mark.embedded
def test_the_example_with_everything_in_it_is_equal_on_both_tiers_and_takes_every_path() -> None:
    workload = read_workload(EXAMPLE)
    report = compare_tiers((load_tier("reference"), load_tier("fast")), DEFAULT_MODEL, workload)
    assert report.divergence is None, report.divergence
    assert report.num_preemptions > 0
    assert report.num_swapped_blocks > 0
    assert report.num_block_copies > 0
    assert report.num_accepted_drafts > 0
    assert report.num_cached_tokens > 0
    assert (report.num_finished, report.num_errors) == (len(workload.requests), 0)
    reasons = {name: output.outputs[0].finish_reason for name, output in report.finished.items()}
    assert reasons["aborted"] == "abort"
    assert reasons["json"] == "stop"
    assert report.finished["choice"].outputs[0].text in ("yes", "no")
    assert report.finished["scored"].prompt_logprobs is not None
