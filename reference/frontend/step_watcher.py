"""Between an engine that never waits and somebody who watches its steps, and may be slow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from reference.frontend.core_messages import StepRecord

MAX_STEPS_BEHIND = 1024


class StepWatcher:
    """Steps on their way to one reader, as JSON objects for a `trace_file.StepDecoder`; iterate over it.

    Most steps are differences from the step before. So a reader starts at a keyframe, and for one that falls too far
    behind a keyframe is made: what it has not read by then is dropped, and it sees a gap in the numbers of the steps.

    Args:
        ask_for_keyframe: has the engine core make its next step one.
    """

    def __init__(self, ask_for_keyframe: Callable[[], None]) -> None:
        self._ask_for_keyframe = ask_for_keyframe
        self._steps: deque[str] = deque()
        self._is_new = True
        self._is_behind = False
        self._is_ended = False
        self._ready = asyncio.Event()

    def put(self, step: StepRecord) -> None:
        if self._is_new and not step.is_keyframe:
            return
        self._is_new = False
        if step.is_keyframe and self._is_behind:
            self._steps.clear()
            self._is_behind = False
        self._steps.append(step.content)
        self._ready.set()
        if len(self._steps) >= MAX_STEPS_BEHIND and not self._is_behind:
            self._is_behind = True
            self._ask_for_keyframe()

    def end(self) -> None:
        """No more steps will come."""
        self._is_ended = True
        self._ready.set()

    def __aiter__(self) -> StepWatcher:
        return self

    async def __anext__(self) -> str:
        await self._ready.wait()
        if not self._steps:
            raise StopAsyncIteration
        step = self._steps.popleft()
        if not self._steps and not self._is_ended:
            self._ready.clear()
        return step
