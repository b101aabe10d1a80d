"""How many blocks of a kernel one multiprocessor holds at a time, and what keeps it from holding more.

The rules of cuda_occupancy.h, which comes with CUDA, for kernels whose shared memory is carved out as large as they
need. tests/kernels/test_occupancy.py compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32  # threads
REGISTER_UNIT = 256  # registers, handed out to a warp
SHARED_UNIT = 128  # bytes, handed out to a block
SHARED_RESERVED = 1024  # bytes that the system takes for itself, of each block's share
QUARTERS = 4  # of a multiprocessor: each has its own warps and registers


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities")."""

    warps: int
    blocks: int
    registers: int
    shared_bytes: int
    block_shared_bytes: int  # the most that one block can ask for


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(64, 32, 65536, 164 * 1024, 163 * 1024),
    "sm_90": Multiprocessor(64, 32, 65536, 228 * 1024, 227 * 1024),
}


@dataclass(frozen=True)
class Occupancy:
    """`limits` names what allows no further block: warps, registers, shared memory, blocks. 0 blocks: no launch."""

    blocks: int
    warps: int
    share: float  # of the multiprocessor's warps
    limits: tuple[str, ...]


def occupancy(architecture: str, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Occupancy of blocks of `threads` threads with `registers` a thread and `shared_bytes` a block.

    Raises KeyError for an architecture that is not in MULTIPROCESSORS.
    """
    sm = MULTIPROCESSORS[architecture]
    warps = -(-threads // WARP)
    per_warp = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    per_block = -(-(shared_bytes + SHARED_RESERVED) // SHARED_UNIT) * SHARED_UNIT
    register_warps = sm.registers // QUARTERS // per_warp * QUARTERS if per_warp else sm.warps
    most = {
        "blocks": sm.blocks,
        "warps": sm.warps // warps,
        "registers": register_warps // warps,
        "shared memory": sm.shared_bytes // per_block if shared_bytes <= sm.block_shared_bytes else 0,
    }
    blocks = min(most.values())
    limits = tuple(name for name, count in most.items() if count == blocks)
    return Occupancy(blocks, blocks * warps, blocks * warps / sm.warps, limits)
