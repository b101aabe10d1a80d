"""What finds each bug of planted_bugs.cu.

`error` is a pattern of the exception that an ordinary build throws; `wrong` says that an ordinary build computes wrong
values; `address` is a pattern of AddressSanitizer's or UBSan's report; `race` says that ThreadSanitizer reports a data
race. A report must name a line marked AT(name), where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    name: str
    error: str = ""
    wrong: bool = False
    address: str = ""
    race: bool = False


RACES = (
    Bug("missing_barrier", wrong=True, race=True),
    Bug("missing_barrier_at_the_end_of_a_loop", race=True),
    Bug("missing_syncwarp", wrong=True, race=True),
    Bug("shuffle_taken_for_a_barrier", race=True),
    Bug("missing_atomic", race=True),
    Bug("two_blocks_write_one_place", race=True),
    Bug("async_copy_read_by_others_without_a_barrier", wrong=True, race=True),
    Bug("flag_without_a_fence", race=True),
    Bug("reduction_reuses_its_scratch", race=True),
)
MEMORY = (
    Bug("uninitialised_shared", wrong=True),
    Bug("async_copy_without_a_wait", wrong=True),
    Bug("static_shared_out_of_bounds", address="index 64 out of bounds for type 'float"),
    Bug("dynamic_shared_too_small", address="AddressSanitizer: heap-buffer-overflow"),
    Bug("global_out_of_bounds", address="AddressSanitizer: heap-buffer-overflow"),
    Bug("misaligned_vector_load", address="misaligned address"),
    Bug("corrupt_block_table", address="AddressSanitizer"),
)
DIVERGENCE = (
    Bug(
        "barrier_for_half_of_the_block",
        r"thread \(0,0,0\).*waits at __syncthreads for threads of its block that do not come; "
        r"thread \(32,0,0\) has exited",
    ),
    Bug(
        "two_different_barriers",
        r"came to another __syncthreads while thread \(0,0,0\) waits at __syncthreads",
    ),
    Bug("early_exit_before_a_barrier", r"do not come; thread \(50,0,0\) has exited"),
    Bug(
        "loop_of_different_length", r"thread \(60,0,0\).*waits at __syncthreads.*thread \(0,0,0\) has exited"
    ),
    Bug(
        "shuffle_in_half_of_the_warp",
        r"waits at __shfl_xor_sync for lanes that do not come; thread \(16,0,0\) has exited",
    ),
    Bug("lane_outside_its_own_mask", r"mask 0x0000ffff, which leaves the calling lane 16 out"),
    Bug("shuffle_from_a_lane_outside_the_mask", r"mask 0x0000ffff reads lane 16, which takes no part"),
    Bug(
        "lanes_disagree_about_the_mask",
        r"0xffffffff while thread \(1,0,0\) waits at __any_sync, .*, with mask 0xfffffffe",
    ),
    Bug("exited_lane_in_the_mask", r"with mask 0xffffffff, whose lanes 0x00000001 have exited"),
    Bug("misaligned_async_copy", r"cp\.async of 16 bytes is misaligned"),
    Bug("trap_on_bad_input", r"block \(1,0,0\) thread \(6,0,0\).*__trap"),
)
LIMITS = (
    Bug("too_much_static_shared", r"take 49156 bytes, the most is 49152: use dynamic shared memory"),
    Bug("too_much_dynamic_shared", r"at most 166912 bytes of shared memory on sm_80, got 167936"),
    Bug("too_much_shared_in_all", r"the block uses 167936 bytes of shared memory, sm_80 has 166912"),
    Bug("too_much_for_another_architecture", r"at most 101376 bytes of shared memory on sm_86, got 102400"),
    Bug("too_many_threads", r"a block of 1 to 1024 threads.*got \(64,17,1\)"),
    Bug("too_deep_a_block", r"a depth of at most 64, got \(1,1,65\)"),
    Bug("no_threads_at_all", r"a block of 1 to 1024 threads.*got \(0,1,1\)"),
)
BUGS = (*RACES, *MEMORY, *DIVERGENCE, *LIMITS)
