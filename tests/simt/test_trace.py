"""What a trace counts, for kernels whose accesses can be counted on paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simt import native

OUT = "write global out 4: 1 instructions, 32 lanes, 4 sectors of 4, 0 wavefronts of 0"
OUT_16 = "write global out 16: 1 instructions, 32 lanes, 16 sectors of 16, 0 wavefronts of 0"
QUIET = "barriers 0, unnamed 0"

EXPECTED = {
    # 32 neighbouring floats are 128 bytes: 4 sectors.
    "neighbours": [
        "read global in 4: 1 instructions, 32 lanes, 4 sectors of 4, 0 wavefronts of 0",
        OUT,
        QUIET,
    ],
    # Every eighth float is the first of another sector.
    "every_eighth": [
        "read global in 4: 1 instructions, 32 lanes, 32 sectors of 4, 0 wavefronts of 0",
        OUT,
        QUIET,
    ],
    "one_number_for_all": [
        "read global in 4: 1 instructions, 32 lanes, 1 sectors of 1, 0 wavefronts of 0",
        OUT,
        QUIET,
    ],
    # One float on, the last one falls into a fifth sector.
    "shifted": ["read global in 4: 1 instructions, 32 lanes, 5 sectors of 4, 0 wavefronts of 0", OUT, QUIET],
    # Each block does the same: two warps of which the second has the next 128 bytes.
    "two_blocks": [
        "read global in 4: 4 instructions, 128 lanes, 16 sectors of 16, 0 wavefronts of 0",
        "write global out 4: 4 instructions, 128 lanes, 16 sectors of 16, 0 wavefronts of 0",
        QUIET,
    ],
    "vectors": [
        "read global in 16: 1 instructions, 32 lanes, 16 sectors of 16, 0 wavefronts of 0",
        OUT_16,
        QUIET,
    ],
    # Two rounds of 32 lanes and two of the upper 16, which are 64 bytes: 4 + 4 + 2 + 2 sectors.
    "unequal_rounds": [
        "read global in 4: 4 instructions, 96 lanes, 12 sectors of 12, 0 wavefronts of 0",
        OUT,
        QUIET,
    ],
    # Rows of 32 floats: a column lies in one bank.
    "columns": [
        *2 * ["write shared tile 4: 1 instructions, 32 lanes, 0 sectors of 0, 32 wavefronts of 1"],
        "read shared tile 4: 1 instructions, 32 lanes, 0 sectors of 0, 1 wavefronts of 1",
        "read shared tile 4: 1 instructions, 32 lanes, 0 sectors of 0, 32 wavefronts of 1",
        OUT,
        "barriers 1, unnamed 0",
    ],
    # Rows of 33: a column has a number in each bank.
    "padded_columns": [
        *2 * ["write shared tile 4: 1 instructions, 32 lanes, 0 sectors of 0, 1 wavefronts of 1"],
        "read shared tile 4: 1 instructions, 32 lanes, 0 sectors of 0, 1 wavefronts of 1",
        "read shared tile 4: 1 instructions, 32 lanes, 0 sectors of 0, 1 wavefronts of 1",
        OUT,
        "barriers 1, unnamed 0",
    ],
    # Rows of 2: lanes l and l + 16 meet in a bank.
    "two_way": [
        *2 * ["write shared tile 4: 1 instructions, 32 lanes, 0 sectors of 0, 2 wavefronts of 1"],
        "read shared tile 4: 1 instructions, 32 lanes, 0 sectors of 0, 1 wavefronts of 1",
        "read shared tile 4: 1 instructions, 32 lanes, 0 sectors of 0, 2 wavefronts of 1",
        OUT,
        "barriers 1, unnamed 0",
    ],
    # 512 bytes are four passes at best.
    "wide_shared": [
        "read global in 16: 1 instructions, 32 lanes, 16 sectors of 16, 0 wavefronts of 0",
        "write shared tile 16: 1 instructions, 32 lanes, 0 sectors of 0, 4 wavefronts of 4",
        "read shared tile 16: 1 instructions, 32 lanes, 0 sectors of 0, 4 wavefronts of 4",
        OUT_16,
        QUIET,
        "__syncwarp 1",
    ],
    "counted": [
        "atomic global counter 4: 1 instructions, 32 lanes, 1 sectors of 1, 0 wavefronts of 0",
        QUIET,
        "__shfl_xor_sync 1",
    ],
    # What no argument names is counted as such and as nothing else.
    "wanders": [OUT, "barriers 0, unnamed 32"],
}


@pytest.fixture(scope="session")
def program(build_folder: Path) -> Path:
    return native.build("traced", "trace", build_folder)


@pytest.mark.parametrize("kernel", EXPECTED)
def test_a_trace_counts_what_can_be_counted_on_paper(program: Path, kernel: str) -> None:
    result = native.run(program, kernel)
    assert result.status == 0, result.text
    assert sorted(result.text.splitlines()) == sorted(EXPECTED[kernel])
