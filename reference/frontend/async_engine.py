"""`AsyncLLM`: the engine for servers. Requests come and go on an event loop while the core runs by itself.

    generate()  prompt -> InputProcessor -> AddRequest ------------->  engine core (its own process, as a rule)
                                                                          |  StepNews, one a step
    reader  <-  OutputCollector  <-  OutputProcessor  <-  _read_news  <---+

(vLLM: `vllm/v1/engine/async_llm.py`.)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from reference.contracts.protocols import Tier
from reference.contracts.request import child_request_id
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.core_client import AsyncEngineCoreClient, ClientMode, EngineDeadError
from reference.frontend.core_messages import (
    AbortRequests,
    AddRequest,
    CallResult,
    CoreStats,
    PackedRequest,
    ResetPrefixCache,
    StepNews,
    WatchSteps,
)
from reference.frontend.engine_args import EngineArgs
from reference.frontend.engine_core import EngineCore
from reference.frontend.input_processor import InputProcessor, Prompt
from reference.frontend.output_collector import OutputCollector, OutputKind
from reference.frontend.output_processor import OutputProcessor
from reference.frontend.outputs import RequestOutput
from reference.frontend.step_watcher import StepWatcher
from reference.frontend.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from typing_extensions import Self

OnNews = Callable[[Sequence[RequestOutput], CoreStats], None]


class AsyncLLM:
    """An engine for concurrent requests. Make one with `from_engine_args`, inside the event loop that it is to serve.

    Attributes:
        config: sizes and limits.
        tier_name: of the implementation.
        tokenizer: the model's.
        on_news: called after each step, and each abort, with the outputs it gave and the state of the core.
        stats: the state of the core after its last step.
    """

    default_tier: Tier | None = None

    def __init__(
        self,
        client: AsyncEngineCoreClient,
        tokenizer: Tokenizer,
        on_news: OnNews | None = None,
        tier_name: str = "",
    ) -> None:
        self.client = client
        self.tier_name = tier_name
        self.config = client.config
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(self.config, tokenizer)
        self.output_processor = OutputProcessor(tokenizer)
        self.on_news = on_news
        self.stats = CoreStats()
        self.num_arrivals = 0
        self._dead: EngineDeadError | None = None
        self._died = asyncio.Event()
        self._collectors: dict[str, OutputCollector] = {}
        self._calls: dict[int, asyncio.Future[bool]] = {}
        self._call_ids = count()
        self._watchers: set[StepWatcher] = set()
        self._is_ending = False
        self._reader = asyncio.create_task(self._read_news())

    @classmethod
    async def from_engine_args(
        cls, args: EngineArgs, tier: Tier | None = None, mode: ClientMode = "process"
    ) -> Self:
        """Load the model and start the engine core.

        Args:
            tier: the implementation; `reference.AsyncLLM` and `fast.AsyncLLM` have one already.
            mode: where the core runs, "process", "thread" or "inproc": see `core_client`.

        Raises:
            ValueError: the tier cannot run here, an option or the model is not acceptable.
            EngineDeadError: the core's process ended while it started.
        """
        tier = tier or cls.default_tier
        if tier is None:
            raise ValueError("No tier was given; use reference.AsyncLLM or fast.AsyncLLM, or give one.")
        client = await AsyncEngineCoreClient.make_client(mode, args, tier)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, client.model_path)
            return cls(client, tokenizer, tier_name=tier.name)
        except BaseException:
            await client.close()
            raise

    @classmethod
    async def from_engine_core(
        cls, core: EngineCore, tokenizer: Tokenizer, mode: ClientMode = "thread"
    ) -> Self:
        """Run a core that was built already; `mode` is "thread" or "inproc"."""
        return cls(AsyncEngineCoreClient.from_core(mode, core), tokenizer, tier_name=core.tier_name)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        output_kind: OutputKind = "cumulative",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt; the last output has `finished` set.

        Closing the generator, or cancelling its reader, aborts the request. A reader that is slow gets fewer and
        larger outputs and holds nobody up.

        Args:
            request_id: unique among the unfinished requests.
            output_kind: "cumulative", "delta" or "final": see `OutputCollector`.

        Raises:
            ValueError: the prompt or a parameter is not acceptable, or the id is taken.
            EngineDeadError: the engine core is gone.
        """
        if isinstance(prompt, str):
            prompt = {"prompt": prompt, "prompt_token_ids": await self.encode(prompt)}
        await self.prepare(sampling_params)
        collector = self.add_request(
            request_id,
            prompt,
            sampling_params,
            priority=priority,
            cache_salt=cache_salt,
            output_kind=output_kind,
        )
        try:
            finished = False
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        finally:
            self.abort(request_id)

    async def encode(self, text: str) -> list[int]:
        """Text to ids in a thread: a long text must not stop the event loop."""
        return await asyncio.to_thread(self.tokenizer.encode, text)

    async def prepare(self, params: SamplingParams) -> None:
        """Compile what constrains the output, in a thread; whoever submits the request then finds it done.

        Raises ValueError when it cannot be compiled.
        """
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            await asyncio.to_thread(self.input_processor.grammars.compile, params.structured_outputs)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        output_kind: OutputKind = "cumulative",
    ) -> OutputCollector:
        """Queue a request and return where its outputs come out; arguments and errors are those of `generate`.

        The caller must `abort` it when the outputs are no longer wanted. It is all done at once: who has checked
        something before, such as the length of a queue, can rely on it. A text is tokenized on the event loop; `encode`
        it first, and `prepare` the parameters.
        """
        self.check_health()
        collector = OutputCollector(output_kind)
        request, text = self.input_processor.process(
            request_id,
            prompt,
            params,
            arrival_number=self.num_arrivals,
            priority=priority,
            cache_salt=cache_salt,
        )
        names = [child_request_id(request_id, index) for index in range(params.n)]
        known = self.output_processor
        if any(name in known.sequences or name in known.states for name in names):
            raise ValueError(f"A request with the id {request_id!r:.100} is already in the engine.")
        limit, num_tokens = self.config.max_total_tokens, len(request.prompt_token_ids)
        if num_tokens >= limit:
            raise ValueError(
                f"The prompt has {num_tokens} tokens, but the KV cache holds no more than {limit - 1}; shorten the "
                f"prompt or raise num_blocks or kv_cache_memory."
            )
        self.num_arrivals += 1  # only now: a refused request must not change the seeds of those after it
        self._collectors[request_id] = collector
        known.add_request(request, text)
        self.client.send(AddRequest(PackedRequest.pack(request)))
        return collector

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests now; their readers get a last output with the finish reason `abort`. Unknown ids are ignored."""
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        sequence_ids = self.output_processor.sequence_ids(names)
        if sequence_ids and self._dead is None:
            self.client.send(AbortRequests(sequence_ids))
        outputs = self.output_processor.abort_requests(names)
        self._deliver(outputs)
        for name in names:
            self._collectors.pop(name, None)
        if outputs and self.on_news is not None:
            self.on_news(outputs, self.stats)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self.output_processor.states)

    def unfinished_request_ids(self) -> list[str]:
        return list(self.output_processor.states)

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine core is gone."""
        if self._dead is not None:
            raise self._dead

    async def wait_until_dead(self) -> EngineDeadError:
        await self._died.wait()
        assert self._dead is not None
        return self._dead

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while requests hold blocks."""
        self.check_health()
        call_id = next(self._call_ids)
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self.client.send(ResetPrefixCache(call_id))
        return await future

    @contextmanager
    def watch_steps(self) -> Iterator[StepWatcher]:
        """A context in which every step from now on can be read: `async for step in watcher`.

        The first one is a keyframe. A watcher that is too slow misses steps, and holds nobody up. The steps end with
        the engine.

        Raises:
            ValueError: the engine records no traces.
            EngineDeadError: the engine core is gone.
        """
        if not self.config.trace:
            raise ValueError("This engine records no traces; make it with trace=True.")
        self.check_health()
        watcher = StepWatcher(self._ask_for_keyframe)
        self._watchers.add(watcher)
        self._ask_for_keyframe()
        if self._is_ending:
            watcher.end()
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers and self._dead is None:
                self.client.send(WatchSteps(False))

    def _ask_for_keyframe(self) -> None:
        self.client.send(WatchSteps(True))

    def end_watches(self) -> None:
        """No more steps for those who `watch_steps`, and none for those who are about to."""
        self._is_ending = True
        for watcher in self._watchers:
            watcher.end()

    async def close(self) -> None:
        """End the engine core; unfinished requests are aborted."""
        self.abort(self.unfinished_request_ids())
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader
        await self.client.close()
        self._die(EngineDeadError("The engine was shut down."))

    async def _read_news(self) -> None:
        try:
            while True:
                news = await self.client.receive()
                if isinstance(news, StepNews):
                    self._take_step(news)
                elif isinstance(news, CallResult):
                    self._calls.pop(news.call_id).set_result(news.value)
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:  # whatever it was, nobody may wait for ever
            self._die(
                EngineDeadError(f"The news of the engine cannot be read ({type(error).__name__}: {error}).")
            )

    def _take_step(self, news: StepNews) -> None:
        self.output_processor.note_admitted(news.stats.queue_times)
        outputs, to_abort = self.output_processor.process_outputs(news.outputs)
        if to_abort:
            self.client.send(AbortRequests(to_abort))
        self.stats = msgspec.structs.replace(news.stats, step_tokens=0, queue_times={})
        self._deliver(outputs)
        if self.on_news is not None:
            self.on_news(outputs, news.stats)
        for watcher in self._watchers:
            for step in news.traces:
                watcher.put(step)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            collector = self._collectors.get(output.request_id)
            if collector is not None:
                collector.put(output)
                if output.finished:
                    del self._collectors[output.request_id]

    def _die(self, error: EngineDeadError) -> None:
        if self._dead is not None:
            return
        self._dead = error
        self._died.set()
        for collector in self._collectors.values():
            collector.fail(error)
        self.output_processor.abort_requests(self.unfinished_request_ids())
        self._collectors.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()
        self.end_watches()
