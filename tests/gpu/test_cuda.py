"""What only a GPU can show. Everything else runs on it with TWINFER_TEST_DEVICE=cuda (see `tests/devices.py`)."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from fast import kernels
from fast.device_forward import DeviceForward
from fast.model_runner import ModelRunner
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.diff import compare_tiers
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.tiers import load_tier
from reference.frontend.workload import Workload, WorkloadRequest
from tests.tiny_models import make_tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(kernels.why_no_gpu() is not None, reason=f"no GPU: {kernels.why_no_gpu()}"),
]


def cuda_engine(model: Path, **options: object) -> LLMEngine:
    args = EngineArgs(str(model), device="cuda", max_model_len=128, **options)  # type: ignore[arg-type]
    return LLMEngine.from_engine_args(args, load_tier("fast"))


def forward_of(engine: LLMEngine) -> DeviceForward:
    runner = engine.engine_core.executor.model_runner  # type: ignore[attr-defined]
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.forward, DeviceForward)
    return runner.forward


def test_decode_steps_are_recorded_once_a_size(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    engine = cuda_engine(tmp_path, max_num_seqs=4)
    forward, recorded = forward_of(engine), []
    record = forward._record
    forward._record = lambda size: recorded.append(size) or record(size)  # type: ignore[method-assign, func-returns-value]
    for i, max_tokens in enumerate((12, 9, 6)):
        engine.add_request(f"r{i}", [10 + i] * 5, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    assert sorted(recorded) == [1, 2, 4]
    assert sorted(forward._graphs) == [1, 2, 4]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_decode_step_waits_for_the_gpu_once(tmp_path: Path, temperature: float) -> None:
    make_tiny_llama(tmp_path)
    engine = cuda_engine(tmp_path, max_num_seqs=2)
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, top_k=9, seed=1)
    for name in ("a", "b"):
        engine.add_request(name, [10] * 5, params)
    for _ in range(3):  # the prompts, and the recording of a decode step
        engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "called a synchronizing" in str(warning.message)]
    assert len(waits) == 1, waits


def test_a_launch_goes_to_the_current_stream(tmp_path: Path) -> None:
    ladder, stream = kernels.ladder("cuda"), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    x = torch.randn(64, 4096, device="cuda")
    out = torch.empty_like(x)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what follows on this stream has to wait
        x.mul_(2.0)
        ladder.softmax(out, x)
    stream.synchronize()
    torch.testing.assert_close(out, x.softmax(-1), rtol=0, atol=2e-6)


def test_a_graph_replays_a_launch_on_what_its_memory_holds_then() -> None:
    ladder = kernels.ladder("cuda")
    x, out = torch.zeros(2, 600, device="cuda"), torch.empty(2, dtype=torch.int64, device="cuda")
    ladder.argmax(out, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ladder.argmax(out, x)
    x[0, 17], x[1, 599] = 1.0, 2.0
    graph.replay()
    assert out.tolist() == [17, 599]


def test_tensors_of_the_cpu_are_refused() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="x: expected a tensor on a CUDA device"):
        kernels.ladder("cuda").softmax(x, x)


def test_memory_that_is_not_pinned_is_refused_for_swaps() -> None:
    cache = torch.zeros(4, 2, 1, 8, device="cuda")
    pairs = torch.tensor([[1, 2]], device="cuda")
    with pytest.raises(ValueError, match="target: expected pinned memory"):
        kernels.ladder("cuda").swap_blocks(cache, torch.zeros(4, 2, 1, 8), pairs)
    pinned = torch.zeros(4, 2, 1, 8, pin_memory=True)
    kernels.ladder("cuda").swap_blocks(cache.fill_(3.0), pinned, pairs)
    torch.cuda.synchronize()
    assert pinned[2].eq(3.0).all()
    assert not pinned[:2].any()


def test_the_pool_and_everything_else_stay_within_the_share(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, max_position=4096)
    free, total = torch.cuda.mem_get_info()
    share = 1 - (free - 2 * 1024**3) / total  # two GiB beside what is in use
    args = EngineArgs(str(tmp_path), device="cuda", gpu_memory_utilization=share, max_num_seqs=4096)
    engine = LLMEngine.from_engine_args(args, load_tier("fast"))
    cache = forward_of(engine).kv_caches
    pool = sum(each.nbytes for pair in cache for each in pair)
    assert 1.0 * 1024**3 < pool < 2 * 1024**3
    assert (
        torch.cuda.mem_get_info()[0] >= total * (1 - share) - 64 * 1024**2
    )  # libraries take some when first used


@pytest.mark.embedded
def test_the_embedded_model_gives_the_tokens_of_the_reference() -> None:
    requests = tuple(
        WorkloadRequest(
            f"r{i}",
            prompt=f"The {name} is",
            params=SamplingParams(max_tokens=16, temperature=0.8 * (i % 2), seed=i),
        )
        for i, name in enumerate(("capital of France", "largest ocean", "opposite of hot"))
    )
    tiers = (load_tier("reference"), load_tier("fast"))
    report = compare_tiers(tiers, "smollm2-135m", Workload(requests, {"max_model_len": 256}), device="cuda")
    assert report.is_equal, report.divergence
    assert not report.excused
