"""Types of the compiled module (csrc/bindings_cpu.cpp); fast/kernels.py documents the functions."""

from torch import Tensor

def isa() -> str: ...
def reshape_and_cache(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, threads: int
) -> None: ...
def paged_attention(
    out: Tensor,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None,
    threads: int,
) -> None: ...
def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float, threads: int) -> None: ...
def head_rms_norm(x: Tensor, weight: Tensor, eps: float, threads: int) -> None: ...
def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, threads: int) -> None: ...
def layer_norm(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float, threads: int) -> None: ...
def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, threads: int
) -> None: ...
def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, threads: int
) -> None: ...
def silu_and_mul(out: Tensor, gate_up: Tensor, threads: int) -> None: ...
def gelu(out: Tensor, x: Tensor, threads: int) -> None: ...
def apply_token_bitmask(logits: Tensor, rows: Tensor, bitmasks: Tensor, threads: int) -> None: ...
def process_logits(
    logits: Tensor,
    rows: Tensor,
    allowed_starts: Tensor,
    allowed_ids: Tensor,
    masked_starts: Tensor,
    masked_ids: Tensor,
    biased_starts: Tensor,
    biased_ids: Tensor,
    biases: Tensor,
    seen_starts: Tensor,
    seen_ids: Tensor,
    counts: Tensor,
    repetition_penalty: Tensor,
    presence_penalty: Tensor,
    frequency_penalty: Tensor,
    threads: int,
) -> None: ...
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    output_positions: Tensor,
    out: Tensor,
    threads: int,
) -> None: ...
def gumbel_noise(seed: int, output_position: int, out: Tensor) -> None: ...
def philox4x32(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, int, int, int]: ...
