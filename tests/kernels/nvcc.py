"""The CUDA toolkit for the tests that compile, and how they do without it where there is none to be had."""

from __future__ import annotations

import sys

import pytest

from tools.cuda_toolkit import RELEASE, Toolkit, find_toolkit

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="there is no nvcc for this system")
# One worker compiles for all tests.
in_one_worker = pytest.mark.xdist_group("nvcc")


def the_toolkit() -> Toolkit:
    found = find_toolkit()
    if found is None:
        pytest.fail(
            f"no nvcc {RELEASE}: `make test` installs it, and so does tools/setup.sh nvcc", pytrace=False
        )
    return found
