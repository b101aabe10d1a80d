"""Types of the compiled module (csrc/bindings_device.cpp); fast/ladder.py documents the functions."""

from torch import Tensor

class Simulation:
    def __init__(self, seed: int, threads: int, architecture: str) -> None: ...

def rungs() -> dict[str, tuple[str, ...]]: ...
def rms_norm(
    out: Tensor, x: Tensor, weight: Tensor, eps: float, rung: str, simulation: Simulation
) -> None: ...
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rung: str, simulation: Simulation
) -> None: ...
def layer_norm(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor, eps: float, rung: str, simulation: Simulation
) -> None: ...
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    rung: str,
    simulation: Simulation,
) -> None: ...
def copy_blocks(
    k_cache: Tensor, v_cache: Tensor, block_mapping: Tensor, rung: str, simulation: Simulation
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
    simulation: Simulation,
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
    simulation: Simulation,
) -> None: ...
def silu_and_mul(out: Tensor, gate_up: Tensor, rung: str, simulation: Simulation) -> None: ...
def gelu(out: Tensor, x: Tensor, rung: str, simulation: Simulation) -> None: ...
def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, rung: str, simulation: Simulation
) -> None: ...
def softmax(out: Tensor, x: Tensor, rung: str, simulation: Simulation) -> None: ...
def argmax(out: Tensor, x: Tensor, rung: str, simulation: Simulation) -> None: ...
