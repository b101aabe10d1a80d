"""The fast tier on a CPU gives a request the same logits, bit for bit, whatever else the engine does meanwhile.

The reference promises this of tokens only: BLAS adds in another order for another batch.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from reference.contracts.sampling_params import SamplingParams
from reference.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest, run_workload
from tests.architectures import ARCHITECTURES
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import make_tiny_llama, make_tiny_model

QTYPES = ("Q4_1", "Q4_0", "Q8_0", "F16", "BF16", "F32")
Logits = dict[str, list[bytes]]  # of each token of each request
THREADS = (1, 2, 4)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINFER_HOME", str(tmp_path / "home"))


@pytest.fixture
def use_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that three threads have something to do: below 2^17 operations a kernel keeps to one."""
    root = tmp_path_factory.mktemp("model")
    return make_tiny_llama(
        root, hidden_size=192, num_heads=6, num_kv_heads=2, intermediate_size=448, max_position=256
    )


def requests(seed: int) -> list[WorkloadRequest]:
    """Prompts of one to three chunks, some with a common beginning, arriving over time."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, 300) for _ in range(40)]
    made = []
    for i in range(9):
        prompt = shared[: rng.choice([0, 40])] + [rng.randrange(2, 300) for _ in range(rng.randint(1, 90))]
        params = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=i, max_tokens=12, ignore_eos=True)
        made.append(
            WorkloadRequest(
                f"r{i}", prompt_token_ids=tuple(prompt), arrival_step=rng.randint(0, 6), params=params
            )
        )
    return made


def run(model: Path, chosen: list[WorkloadRequest], **options: Any) -> tuple[Logits, int]:
    """Logits of every sampled token, and the number of preemptions."""
    logits: Logits = defaultdict(list)
    preempted = 0

    def keep(schedule: SchedulerOutput, output: ModelRunnerOutput) -> None:
        nonlocal preempted
        preempted += len(schedule.preempted_req_ids)
        for request_id, rows in (output.logits or {}).items():
            logits[request_id].extend(row.tobytes() for row in np.atleast_2d(rows))

    args = EngineArgs(model=str(model), keep_logits=True, max_model_len=256, block_size=8, **options)
    engine = LLMEngine.from_engine_args(args, load_tier("fast"), on_step=keep)
    run_workload(engine, Workload(tuple(chosen)))
    assert {name: len(rows) for name, rows in logits.items()} == {r.request_id: 12 for r in chosen}
    return dict(logits), preempted


def assert_same_alone_and_together(model: Path, use_threads: Callable[[int], None]) -> None:
    chosen = requests(seed=0)
    use_threads(1)
    alone: Logits = {}
    for request in chosen:
        alone |= run(model, [request], enable_prefix_caching=False, num_blocks=100)[0]
    for threads in THREADS:
        use_threads(threads)
        for chunk in (16, 61, 512):
            assert run(model, chosen, num_blocks=300, max_num_batched_tokens=chunk)[0] == alone, (
                threads,
                chunk,
            )
        together, preempted = run(model, chosen, num_blocks=34, max_num_batched_tokens=48)
        assert preempted > 0
        assert together == alone, f"{threads} threads, preempted"


@pytest.mark.parametrize("qtype", QTYPES)
def test_logits_have_the_same_bits_alone_in_a_batch_in_chunks_and_after_preemption(
    qtype: str, folder: Path, tmp_path: Path, use_threads: Callable[[int], None]
) -> None:
    """Prefix hits, too: what another request wrote into a shared block are the bits that this one would have."""
    write_tiny_gguf(folder, tmp_path / "model.gguf", gguf.GGMLQuantizationType[qtype])
    assert_same_alone_and_together(tmp_path / "model.gguf", use_threads)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_logits_of_other_architectures_have_the_same_bits_too(
    name: str, tmp_path: Path, use_threads: Callable[[int], None]
) -> None:
    folder = make_tiny_model(tmp_path / name, **ARCHITECTURES[name])
    assert_same_alone_and_together(folder, use_threads)
