"""The C++ programs are those of tests/simt."""

from tests.simt.conftest import build_folder

__all__ = ["build_folder"]
