"""`twinfer bench roofline`: the floor that memory and arithmetic put under each workload, and the share of it reached.

A step cannot end before its bytes have been read, nor before its operations are done:

    bytes       = weights of all layers + head's weights if a token is drawn + T rows of the embedding
                  + K and V of all contexts read + K and V of T tokens written
    operations  = 2 T (weights of all layers) + 2 R (weights of the head) + 4 D H layers (query, key) pairs
    floor       = sum over steps of max(bytes / bandwidth, operations / peak)

Bandwidth and peak are measured before and after each workload, and the better ones count for it: a virtual machine's
cores move, and two that share a cache also share its way to memory (38 and 70 GB/s were seen within a minute). Bytes
and operations are counted, step by step, on the schedule that runs (`fast.bench.replay`). Weights have the size in
which the tier keeps them. Every byte is taken to come from memory: what stays in a cache from one step to the next can
lift a share above what these numbers allow. (Williams, Waterman and Patterson, "Roofline", CACM 2009.)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fast.bench.engines import add_run_options, check_run_options, engine_args, workload_of
from fast.bench.plots import bars
from fast.bench.replay import Step, replay
from fast.bench.results import Document, make_document, print_table, report
from fast.bench.runner import warm_up
from fast.bench.throughput import measure
from reference.contracts.config import EngineConfig, ModelConfig
from reference.contracts.protocols import Checkpoint, PackedTensor, Tier
from reference.frontend.checkpoint import load_checkpoint
from reference.frontend.engine_args import EngineArgs
from reference.frontend.llm_engine import LLMEngine
from reference.frontend.model_store import resolve_model
from reference.frontend.tiers import pick_tier
from reference.frontend.tokenizer import load_tokenizer

_GATHERED = (
    "embed_tokens.weight",
    "wte.weight",
    "wpe.weight",
)  # a step reads some rows of these, unless also the head


@dataclass(frozen=True)
class Peaks:
    """What the machine can do at most."""

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class Weights:
    """Sizes of a model as a tier holds it: bytes, and numbers in matrices."""

    layer_bytes: int
    layer_numbers: int
    head_bytes: int
    head_numbers: int
    row_bytes: float  # of one token's rows of the embeddings


class CountingCheckpoint:
    """A checkpoint that remembers what a tier took from it, and in which type."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = checkpoint.config
        self._checkpoint = checkpoint
        self._taken: dict[str, tuple[int, tuple[int, ...]]] = {}  # name -> (bytes, shape)

    def tensor(self, name: str) -> np.ndarray:
        tensor = self._checkpoint.tensor(name)
        self._taken[name] = (tensor.nbytes, tensor.shape)
        return tensor

    def packed_tensor(self, name: str) -> PackedTensor | None:
        packed = self._checkpoint.packed_tensor(name)
        if packed is not None:
            self._taken[name] = (packed.rows.nbytes, (len(packed.rows), packed.in_features))
        return packed

    def check_all_used(self) -> None:
        self._checkpoint.check_all_used()

    def weights(self) -> Weights:
        """Sizes of what was taken."""
        gathered = {name: taken for name, taken in self._taken.items() if name.endswith(_GATHERED)}
        heads = [taken for name, taken in self._taken.items() if name == "lm_head.weight"]
        if not heads:  # tied to the embedding of the tokens, the first of its kind
            heads = [taken for name, taken in gathered.items() if not name.endswith("wpe.weight")]
        layers = [
            taken for name, taken in self._taken.items() if name not in gathered and name != "lm_head.weight"
        ]
        return Weights(
            layer_bytes=sum(num_bytes for num_bytes, _ in layers),
            layer_numbers=sum(int(np.prod(shape)) for _, shape in layers if len(shape) == 2),
            head_bytes=heads[0][0],
            head_numbers=int(np.prod(heads[0][1])),
            row_bytes=sum(num_bytes / shape[0] for num_bytes, shape in gathered.values()),
        )


def add_options(parser: argparse.ArgumentParser, tier: str | None) -> None:
    add_run_options(parser, tier, workloads=("uniform", "mixed", "prefix"))


def run(arguments: argparse.Namespace) -> int:
    check_run_options(arguments)
    args, tier = engine_args(arguments), pick_tier(arguments.tier)
    engine, weights = _make_engine(args, tier)
    figures = {}
    before = best = measure_peaks()
    for name in arguments.workload:
        workload = workload_of(arguments, name, engine.config.model.vocab_size)
        measured = measure(engine, workload, arguments.repeat)
        after = measure_peaks()
        floor = floor_of(replay(tier, engine.config, workload), weights, engine.config)
        figures[name] = {**measured, **shares(measured, floor, better(before, after))}
        before, best = after, better(best, after)
    document = _document(tier, weights, best, figures)
    report(arguments, document, lambda: _print(document), lambda figure: _draw(document, figure))
    return 0


def _make_engine(args: EngineArgs, tier: Tier) -> tuple[LLMEngine, Weights]:
    reason = tier.why_unavailable()
    if reason is not None:
        raise ValueError(reason)
    path = resolve_model(args.model)
    checkpoint = CountingCheckpoint(load_checkpoint(path))
    config = args.create_engine_config(checkpoint.config, tier.default_device())
    engine = LLMEngine(config, tier, checkpoint, load_tokenizer(path))
    return warm_up(engine), checkpoint.weights()


def measure_peaks() -> Peaks:
    """Bandwidth and peak of this machine now. Raises ValueError: the kernels that measure them cannot be loaded."""
    try:
        from fast import kernels
    except ImportError as error:
        raise ValueError(f"The roofline is measured with the fast tier's kernels: {error}") from error
    return Peaks(kernels.read_bandwidth(), kernels.multiply_add_peak())


def better(first: Peaks, second: Peaks) -> Peaks:
    """The larger of each: a neighbour can only take something away."""
    return Peaks(
        max(first.bytes_per_s, second.bytes_per_s), max(first.operations_per_s, second.operations_per_s)
    )


Floor = Callable[
    [Peaks], tuple[float, float]
]  # peaks -> (seconds, seconds of steps that are bound by memory)


def floor_of(steps: Sequence[Step], weights: Weights, config: EngineConfig) -> Floor:
    """The formula at the top of this file, to be filled in with what the machine can do."""
    work = [step_work(step, weights, config.model) for step in steps]

    def floor(peaks: Peaks) -> tuple[float, float]:
        times = [(b / peaks.bytes_per_s, o / peaks.operations_per_s) for b, o in work]
        return sum(map(max, times)), sum(memory for memory, compute in times if memory >= compute)

    return floor


def step_work(step: Step, weights: Weights, model: ModelConfig) -> tuple[float, float]:
    """(bytes, operations) of one step."""
    draws = min(1, step.num_rows)
    kv_tokens = step.num_context_tokens + step.num_tokens  # read, and written
    num_bytes = (
        weights.layer_bytes
        + draws * weights.head_bytes
        + step.num_tokens * weights.row_bytes
        + kv_tokens * model.kv_bytes_per_token()
    )
    attention = 4 * model.head_dim * model.num_attention_heads * model.num_hidden_layers * step.num_pairs
    products = 2 * (step.num_tokens * weights.layer_numbers + step.num_rows * weights.head_numbers)
    return num_bytes, products + attention


def shares(figure: dict[str, Any], floor: Floor, peaks: Peaks) -> dict[str, float]:
    """What the machine could do meanwhile, tokens a second at the floor, the share of it that was reached, and how
    much of the floor is memory."""
    seconds, memory_bound = floor(peaks)
    return {
        "read_bandwidth_bytes_per_s": peaks.bytes_per_s,
        "multiply_add_flops_per_s": peaks.operations_per_s,
        "floor_tokens_per_s": figure["output_tokens"] / seconds,
        "share_of_floor": seconds / figure["seconds"],
        "memory_bound_share": memory_bound / seconds,
    }


def _document(tier: Tier, weights: Weights, peaks: Peaks, figures: dict[str, Any]) -> Document:
    document = make_document("roofline", tier=tier.name, workloads=figures)
    from fast import kernels

    document["machine"] |= {
        "isa": kernels.isa(),
        "read_bandwidth_bytes_per_s": peaks.bytes_per_s,
        "multiply_add_flops_per_s": peaks.operations_per_s,
    }
    document["weights"] = {
        "layer_bytes": weights.layer_bytes,
        "head_bytes": weights.head_bytes,
        "matrix_numbers": weights.layer_numbers + weights.head_numbers,
    }
    return document


def _print(document: Document) -> None:
    headings = ["workload", "requests", "in", "out", "tokens/s", "GB/s", "floor", "share", "memory"]
    rows = [
        [
            name, str(w["requests"]), f"{w['prompt_tokens']:,}", f"{w['output_tokens']:,}", f"{w['tokens_per_s']:.1f}",
            f"{w['read_bandwidth_bytes_per_s'] / 1e9:.1f}",
            f"{w['floor_tokens_per_s']:.1f}", f"{w['share_of_floor']:.1%}", f"{w['memory_bound_share']:.0%}",
        ]
        for name, w in document["workloads"].items()
    ]  # fmt: skip
    machine, weights = document["machine"], document["weights"]
    notes = [
        f"Reads {machine['read_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, computes "
        f"{machine['multiply_add_flops_per_s'] / 1e9:.1f} GFLOP/s ({machine['isa']}, {machine['cores']} cores); "
        f"{(weights['layer_bytes'] + weights['head_bytes']) / 1e6:.1f} MB of weights a step.",
        "GB/s: what can be read, measured before and after the workload. memory: the part of the floor's time in "
        "steps that wait for memory and not for arithmetic.",
    ]
    print_table(f"Roofline of the {document['tier']} tier, generated tokens/s", headings, rows, notes)


def _draw(document: Document, figure: Any) -> None:
    workloads = document["workloads"]
    reached, share = figure.subplots(1, 2)
    names = [f"{name}, {kind}" for name in workloads for kind in ("reached", "floor")]
    values = [w[key] for w in workloads.values() for key in ("tokens_per_s", "floor_tokens_per_s")]
    bars(reached, f"{document['tier']} tier and the machine's floor", names, values, "generated tokens/s")
    percent = [100 * w["share_of_floor"] for w in workloads.values()]
    bars(share, "Share of the floor", list(workloads), percent, "%")
