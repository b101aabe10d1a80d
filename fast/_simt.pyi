"""Types of the compiled module (csrc/bindings_device.cpp); fast/ladder.py documents the functions."""

from torch import Tensor

class Launch:
    def __init__(self, seed: int, threads: int, architecture: str) -> None: ...

def probe() -> None: ...
def rungs() -> dict[str, tuple[str, ...]]: ...
def claims() -> dict[str, tuple[str, ...]]: ...
def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float, rung: str, launch: Launch) -> None: ...
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rung: str, launch: Launch
) -> None: ...
def layer_norm(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float, rung: str, launch: Launch
) -> None: ...
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    rung: str,
    launch: Launch,
) -> None: ...
def copy_blocks(
    k_cache: Tensor, v_cache: Tensor, block_mapping: Tensor, rung: str, launch: Launch
) -> None: ...
def paged_attention(
    out: Tensor,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    rung: str,
    launch: Launch,
) -> None: ...
def prefill_attention(
    out: Tensor,
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    rung: str,
    launch: Launch,
) -> None: ...
def silu_and_mul(out: Tensor, gate_up: Tensor, rung: str, launch: Launch) -> None: ...
def gelu(out: Tensor, x: Tensor, rung: str, launch: Launch) -> None: ...
def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, rung: str, launch: Launch
) -> None: ...
def softmax(out: Tensor, x: Tensor, rung: str, launch: Launch) -> None: ...
def argmax(out: Tensor, x: Tensor, rung: str, launch: Launch) -> None: ...
def swap_blocks(source: Tensor, target: Tensor, block_mapping: Tensor, rung: str, launch: Launch) -> None: ...
def philox(out: Tensor, seeds: Tensor, output_positions: Tensor, rung: str, launch: Launch) -> None: ...
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
    rung: str,
    launch: Launch,
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
    rung: str,
    launch: Launch,
) -> None: ...
