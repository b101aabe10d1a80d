"""Where the tests of the CUDA kernels run: under the emulator, or with TWINFER_TEST_DEVICE=cuda on a GPU."""

from __future__ import annotations

import os
from typing import Any

import torch

from fast.ladder import Ladder

DEVICE = os.environ.get("TWINFER_TEST_DEVICE", "simt")


class Elsewhere:
    """A ladder for tensors of the CPU whose kernels work in another memory: tensors go there and come back.

    Whole storages go, so that tensors that share memory do so there, and what lies between rows comes back too.

    Args:
        ladder: for tensors of `memory`.
        memory: such as "cuda".
    """

    def __init__(self, ladder: Ladder, memory: str) -> None:
        self.ladder = ladder
        self.memory = memory

    @property
    def rungs(self) -> Any:
        return self.ladder.rungs

    def __getattr__(self, operation: str) -> Any:
        method = getattr(self.ladder, operation)

        def call(*args: Any, **named: Any) -> None:
            there: dict[
                int, tuple[torch.Tensor, torch.Tensor]
            ] = {}  # address -> bytes of a storage, here and there
            method(
                *(self._move(arg, there) for arg in args),
                **{name: self._move(arg, there) for name, arg in named.items()},
            )
            for mine, theirs in there.values():
                mine.copy_(theirs)

        return call

    def _move(self, arg: Any, there: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        if not isinstance(arg, torch.Tensor):
            return arg
        storage = arg.untyped_storage()
        if storage.data_ptr() not in there:
            mine = torch.empty(0, dtype=torch.uint8).set_(storage)  # [bytes]
            there[storage.data_ptr()] = mine, mine.to(self.memory, copy=True)
        theirs = there[storage.data_ptr()][1].view(arg.dtype)
        return theirs.as_strided(arg.shape, arg.stride(), arg.storage_offset())
