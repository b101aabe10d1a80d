"""Watching a server: the last steps of its engine as a run that grows, with reconnection and the texts of tokens."""

from __future__ import annotations

import http.client
import json
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from app.runs import RequestInfo, Run, RunInfo, names_in
from app.step_stream import Address, Head, Lost, StepStream, bearer
from reference.contracts.trace import StepTrace

MAX_STEPS = 256  # that are kept; of a server that runs for months nobody wants more in a browser
POLL_S = 0.4
SHOW_EVERY_S = 0.7
MAX_SHARE = 0.2  # of the time spent on making pages, so that the server next door keeps its cores
DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # between attempts to connect again
MAX_NEW_TEXTS = 64  # token ids whose text is asked for before a page is shown
TEXT_TIMEOUT_S = 2.0
UNKNOWN = -1  # arrival of a request that was there before


@dataclass(frozen=True)
class Sight:
    """What there is to tell: a sentence, and the run if steps have come since the last one."""

    sentence: str
    zh: str = ""  # the sentence in Chinese, unless it is somebody else's
    run: Run | None = None
    key: str = ""  # of the run: the same as long as it only grows
    is_error: bool = False


def watch(url: str, api_key: str = "", allow_remote: bool = False) -> Iterator[Sight | None]:
    """Watch a server until it is given up or the iterator is closed; None several times a second in between.

    A stream that breaks off is taken up again after a while, five times at most. A server whose steps begin anew is a
    new run.

    Raises:
        ValueError: see `Address.parse`.
    """
    address = Address.parse(url, allow_remote)
    live, texts, attempt = LiveRun(address.url), Texts(address, api_key), 0
    yield Sight(f"Connecting to {address.url}.", f"正在连接 {address.url}。")
    while True:
        stream = StepStream(address, api_key)
        try:
            lost = yield from _follow(stream, live, texts)
        finally:
            stream.close()
        if live.head is None or lost.is_final or attempt == len(DELAYS_S):
            yield Sight(lost.sentence, is_error=True)
            return
        attempt = 0 if live.num_since_connected else attempt
        yield Sight(f"{lost.sentence} Trying again ({attempt + 1} of {len(DELAYS_S)}).")
        yield from _pause(DELAYS_S[attempt])
        attempt += 1


def live_lesson(run: Run) -> dict[str, Any]:
    """What stands above the steps of a server."""
    info = run.info
    return {
        "title": {"en": f"Live: {info.title}", "zh": f"实时：{info.title}"},
        "lesson": {
            "en": f"{info.model} on the tier {info.tier}. The last {MAX_STEPS} steps are kept. Who stands at the end "
            "follows; step back, and the picture stays.",
            "zh": f"{info.model}，实现 {info.tier}。保留最近 {MAX_STEPS} 步。停在末尾则跟随新步；往回翻，画面就停住。",
        },
        "is_live": True,
    }


def _pause(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(POLL_S, seconds))
        yield None


def _follow(stream: StepStream, live: LiveRun, texts: Texts) -> Generator[Sight | None, None, Lost]:
    """One connection to its end; returns how it was lost."""
    next_show = 0.0
    live.num_since_connected = 0
    while True:
        for event in stream.events(POLL_S):
            if isinstance(event, Lost):
                if live.is_news:
                    yield live.sight(live.run(texts))
                return event
            if isinstance(event, Head):
                live.begin(event)
                yield live.sight()
            else:
                live.add(event)
        if live.is_news and time.monotonic() >= next_show:
            started = time.monotonic()
            texts.learn(live.unknown_ids(texts))
            yield live.sight(live.run(texts))  # the page is made now
            spent = time.monotonic() - started
            next_show = time.monotonic() + max(SHOW_EVERY_S, spent * (1 / MAX_SHARE - 1))
        else:
            yield None


class LiveRun:
    """The last steps of a server.

    Attributes:
        head: what the server says of its engine; None before it was reached.
        key: of the run; another one after the server has begun anew.
        num_since_connected: steps of this connection.
        is_news: steps have come that `run` has not given yet.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.head: Head | None = None
        self.num_since_connected = 0
        self.is_news = False
        self._start()

    def _start(self) -> None:
        self.key = f"live-{time.monotonic_ns()}"
        self.num_seen = 0
        self._traces: deque[StepTrace] = deque(maxlen=MAX_STEPS)
        self._requests: dict[
            str, tuple[int, int]
        ] = {}  # -> its number, and that of the step in which it was first seen
        self._num_forgotten = 0

    def begin(self, head: Head) -> None:
        if self.head is not None and head != self.head:
            self._start()
        self.head = head

    def add(self, trace: StepTrace) -> None:
        if self._traces and trace.step <= self._traces[-1].step:
            self._start()
        for name in names_in(trace):
            is_old = not self.num_seen and name not in trace.num_cached_tokens
            if name not in self._requests:
                self._requests[name] = (
                    len(self._requests) + self._num_forgotten,
                    UNKNOWN if is_old else self.num_seen,
                )
        self._traces.append(trace)
        self.num_seen += 1
        self.num_since_connected += 1
        self.is_news = True

    def _forget(self) -> None:
        """Requests that none of the steps that are kept knows."""
        names = {name for trace in self._traces for name in names_in(trace)}
        kept = {name: request for name, request in self._requests.items() if name in names}
        self._num_forgotten += len(self._requests) - len(kept)
        self._requests = kept

    def sight(self, run: Run | None = None) -> Sight:
        """What is seen of the server now, with `run` or without."""
        if not self._traces:
            return Sight(
                f"Watching {self.url}: connected; no step yet.", f"正在观看 {self.url}：已连接，尚无步。"
            )
        state, kept = self._traces[-1].state, len(self._traces)
        running, waiting = len(state.running), len(state.waiting) + len(state.swapped)
        of, of_zh = (f"the last {kept} of ", f"中的最近 {kept} 步") if kept < self.num_seen else ("", "")
        return Sight(
            f"Watching {self.url}: {of}{self.num_seen} steps; {running} running, {waiting} waiting.",
            f"正在观看 {self.url}：{self.num_seen} 步{of_zh}；运行 {running}，等待 {waiting}。",
            run,
            self.key if run is not None else "",
        )

    def unknown_ids(self, texts: Texts) -> list[int]:
        ids = {i for trace in self._traces for some in trace.sampled_token_ids.values() for i in some}
        ids |= {i for trace in self._traces for some in trace.draft_token_ids.values() for i in some}
        return sorted(ids - texts.by_id.keys())

    def run(self, texts: Texts) -> Run:
        """What is kept, as a run that has not ended."""
        assert self.head is not None
        self.is_news = False
        self._forget()
        dropped = self.num_seen - len(self._traces)
        requests = tuple(
            RequestInfo(name, arrival=max(arrival - dropped, UNKNOWN), number=number)
            for name, (number, arrival) in self._requests.items()
        )
        info = RunInfo(
            title=self.url,
            tier=self.head.tier,
            model=self.head.model,
            block_size=self.head.block_size,
            num_blocks=self.head.num_blocks,
            requests=requests,
            pieces=dict(texts.by_id),
        )
        return Run(info, list(self._traces), is_done=False)


class Texts:
    """Texts of tokens, asked of the server one by one. Where it does not tell, the page shows ids."""

    def __init__(self, address: Address, api_key: str) -> None:
        self.by_id: dict[int, str] = {}
        self._address = address
        self._headers = {"Content-Type": "application/json", **bearer(api_key)}
        self._is_available = True

    def learn(self, token_ids: list[int]) -> None:
        """Ask for the first few of them; the others come with the next page."""
        if not self._is_available or not token_ids:
            return
        connection = self._address.connect(TEXT_TIMEOUT_S)
        try:
            for token_id in token_ids[:MAX_NEW_TEXTS]:
                body = json.dumps({"tokens": [token_id]})
                connection.request("POST", "/detokenize", body, self._headers)
                response = connection.getresponse()
                content = response.read()
                if response.status != 200:
                    self._is_available = False
                    return
                self.by_id[token_id] = str(json.loads(content)["prompt"])
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            self._is_available = False
        finally:
            connection.close()
