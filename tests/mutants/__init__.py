"""Planted bugs, each with the lesson in it and the tests that must notice it: `make test-mutants`."""

from tests.mutants import blocks, computing, scheduling, swapping, text
from tests.mutants.mutant import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant", "blocks", "computing", "scheduling", "swapping", "text"]
