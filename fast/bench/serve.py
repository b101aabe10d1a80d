"""`twinfer bench serve`: load on an OpenAI-compatible server, and what its clients feel.

    open loop     requests come at a rate, as a Poisson process, whether or not the server keeps up
    closed loop   so many clients, each of which sends the next request when it has its answer

Only the open loop shows what a queue does to latency: with the closed one, a slow server is asked less.
(Idea and figures: vLLM's `benchmark_serving.py`.)
"""

from __future__ import annotations

import http.client
import json
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fast.bench.results import Document, print_table

TIMEOUT_S = 600.0
PERCENTILES = ("p50", "p90", "p99")
MAX_THREADS = 512
# Prompts and answers of ShareGPT are spread like this: log-normal, with these medians and deviations of the logarithm.
PROMPT_MEDIAN, OUTPUT_MEDIAN, PROMPT_SIGMA, OUTPUT_SIGMA = 64, 96, 1.0, 0.8
_WORDS = (
    "time",
    "people",
    "water",
    "words",
    "house",
    "music",
    "river",
    "light",
    "garden",
    "number",
    "story",
    "green",
)


@dataclass(frozen=True)
class LoadRequest:
    prompt: str
    max_tokens: int


@dataclass
class Sample:
    """One answered request. Times are in seconds; `due` is when an open loop wanted it sent."""

    due: float
    first: float | None = None  # when the first text came
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between events with text
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return (self.first if self.first is not None else self.last) - self.due

    @property
    def latency(self) -> float:
        return self.last - self.due


@dataclass(frozen=True)
class LoadResult:
    """What one load did. Percentiles are p50, p90 and p99, in milliseconds."""

    load: str
    requests: int
    failed: int
    seconds: float
    requests_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    ttft_ms: tuple[float, float, float]
    itl_ms: tuple[float, float, float]
    e2e_ms: tuple[float, float, float]
    goodput: float | None  # requests a second that met the objectives; None without any
    first_error: str | None


@dataclass(frozen=True)
class Objectives:
    """Service level objectives of a request, in milliseconds; None asks for nothing."""

    ttft_ms: float | None = None
    itl_ms: float | None = None  # mean over a request
    e2e_ms: float | None = None

    def are_met_by(self, sample: Sample) -> bool:
        mean_gap = sum(sample.gaps) / len(sample.gaps) if sample.gaps else 0.0
        pairs = ((self.ttft_ms, sample.ttft), (self.itl_ms, mean_gap), (self.e2e_ms, sample.latency))
        return sample.error is None and all(limit is None or 1000 * value <= limit for limit, value in pairs)

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.ttft_ms, self.itl_ms, self.e2e_ms))


def synthetic_requests(count: int, seed: int, max_total: int, load: int = 0) -> list[LoadRequest]:
    """Requests with lengths like those of ShareGPT's conversations, of at most `max_total` tokens. A word is about one
    token.

    Loads of one seed have the same lengths and other words: a prompt that was sent before would be found in the prefix
    cache, and a later load would seem to be answered sooner.
    """
    lengths, words = random.Random(seed), random.Random(f"{seed}, load {load}")
    requests = []
    for _ in range(count):
        num_words = _length(lengths, PROMPT_MEDIAN, PROMPT_SIGMA, max_total // 2)
        max_tokens = _length(lengths, OUTPUT_MEDIAN, OUTPUT_SIGMA, max_total // 4)
        requests.append(LoadRequest(" ".join(words.choices(_WORDS, k=num_words)), max_tokens))
    return requests


def _length(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(round(rng.lognormvariate(math.log(median), sigma)), most))


def read_requests(path: Path, count: int) -> list[LoadRequest]:
    """JSON lines with `prompt` and, 128 unless given, `max_tokens`; repeated until there are enough.

    Raises:
        ValueError: the file cannot be read, or a line is no such request.
    """
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        found = [LoadRequest(str(line["prompt"]), int(line.get("max_tokens", 128))) for line in lines]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no list of requests ({error}); each line needs a prompt.") from error
    if not found:
        raise ValueError(f"{path} holds no request.")
    return [found[i % len(found)] for i in range(count)]


class LoadClient:
    """Sends requests to one server.

    Args:
        base_url: `http://host:port`, with or without `/v1`.
        api_key: sent as a bearer token if given.
        extra: fields added to each request.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, extra: dict[str, Any] | None = None
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"The URL must look like http://host:port, got {base_url!r}.")
        self._connect: Callable[[], http.client.HTTPConnection] = lambda: (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )(parts.netloc, timeout=TIMEOUT_S)
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._extra = extra or {}
        self.model, self.max_model_len = self._find_model()

    def _find_model(self) -> tuple[str, int]:
        connection = self._connect()
        try:
            connection.request("GET", f"{self._path}/models", headers=self._headers)
            response = connection.getresponse()
            content = response.read()
            if response.status != 200:
                raise ValueError(f"The server answers {response.status} when asked for its models.")
            model = json.loads(content)["data"][0]
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(f"No server answers there ({error}); start one with `twinfer serve`.") from error
        finally:
            connection.close()
        return model["id"], int(model.get("max_model_len") or 2048)

    def send(self, request: LoadRequest, due: float) -> Sample:
        """Send one request and read its stream."""
        sample = Sample(due)
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = self._connect()
        try:
            connection.request(
                "POST", f"{self._path}/completions", json.dumps(body | self._extra), self._headers
            )
            response = connection.getresponse()
            if response.status != 200:
                sample.error = f"status {response.status}: {response.read(500).decode(errors='replace')}"
            else:
                self._read_stream(response, sample)
        except (OSError, http.client.HTTPException, ValueError) as error:
            sample.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        sample.last = time.perf_counter()
        return sample

    def _read_stream(self, response: http.client.HTTPResponse, sample: Sample) -> None:
        before = None
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                return
            chunk = json.loads(line[6:])
            if "error" in chunk:
                sample.error = str(chunk["error"].get("message"))
                return
            if chunk.get("usage"):
                sample.prompt_tokens = chunk["usage"]["prompt_tokens"]
                sample.output_tokens = chunk["usage"]["completion_tokens"]
            if chunk["choices"]:
                now = time.perf_counter()
                if before is None:
                    sample.first = now
                else:
                    sample.gaps.append(now - before)
                before = now
        sample.error = "the stream ended without [DONE]"


def open_loop(client: LoadClient, requests: Sequence[LoadRequest], rate: float, seed: int) -> list[Sample]:
    """Send requests as a Poisson process of `rate` a second, ready or not."""
    rng = random.Random(seed)
    start = time.perf_counter() + 0.1
    due = [start]
    for _ in requests[1:]:
        due.append(due[-1] + rng.expovariate(rate))

    def send(request: LoadRequest, when: float) -> Sample:
        time.sleep(max(0.0, when - time.perf_counter()))
        return client.send(request, when)

    with ThreadPoolExecutor(min(len(requests), MAX_THREADS)) as pool:
        return list(pool.map(send, requests, due))


def closed_loop(client: LoadClient, requests: Sequence[LoadRequest], concurrency: int) -> list[Sample]:
    """`concurrency` clients, each with one request at a time."""
    lock, waiting = threading.Lock(), iter(requests)
    samples: list[Sample] = []

    def work() -> list[Sample]:
        own: list[Sample] = []
        while True:
            with lock:
                request = next(waiting, None)
            if request is None:
                return own
            own.append(client.send(request, time.perf_counter()))

    with ThreadPoolExecutor(concurrency) as pool:
        for done in [pool.submit(work) for _ in range(concurrency)]:
            samples += done.result()
    return samples


def summarise(load: str, samples: Sequence[Sample], objectives: Objectives) -> LoadResult:
    """Figures of one load; failed requests count for nothing but their number."""
    good = [sample for sample in samples if sample.error is None]
    seconds = max(sample.last for sample in samples) - min(sample.due for sample in samples)
    met = sum(objectives.are_met_by(sample) for sample in samples)
    return LoadResult(
        load=load,
        requests=len(samples),
        failed=len(samples) - len(good),
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        prompt_tokens_per_second=sum(sample.prompt_tokens for sample in good) / seconds,
        output_tokens_per_second=sum(sample.output_tokens for sample in good) / seconds,
        ttft_ms=percentiles([sample.ttft for sample in good]),
        itl_ms=percentiles([gap for sample in good for gap in sample.gaps]),
        e2e_ms=percentiles([sample.latency for sample in good]),
        goodput=met / seconds if objectives else None,
        first_error=next((sample.error for sample in samples if sample.error is not None), None),
    )


def percentiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """p50, p90, p99 in milliseconds by nearest rank; NaN of nothing."""
    ranked = sorted(seconds)
    if not ranked:
        return (math.nan,) * 3
    p50, p90, p99 = (1000 * ranked[math.ceil(len(ranked) * percent / 100) - 1] for percent in (50, 90, 99))
    return p50, p90, p99


def as_row(result: LoadResult) -> dict[str, Any]:
    """For a record: percentiles by name, and None where nothing was measured."""
    row = asdict(result)
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        values = (None if math.isnan(value) else value for value in row[name])
        row[name] = dict(zip(PERCENTILES, values, strict=True))
    return row


def print_results(document: Document) -> None:
    """One row a load."""
    headings = ["load", "done", "requests/s", "tokens/s", "TTFT", "between tokens", "end to end", "goodput/s"]
    rows = [
        [
            row["load"], f"{row['requests'] - row['failed']} of {row['requests']}",
            f"{row['requests_per_second']:.2f}", f"{row['output_tokens_per_second']:.1f}",
            *(" / ".join(_shown(value) for value in row[name].values()) for name in ("ttft_ms", "itl_ms", "e2e_ms")),
            "" if row["goodput"] is None else f"{row['goodput']:.2f}",
        ]
        for row in document["loads"]
    ]  # fmt: skip
    notes = [
        f"{row['load']}: {row['failed']} requests failed, the first one with: {row['first_error']}"
        for row in document["loads"]
        if row["first_error"] is not None
    ]
    print_table("Times in ms: p50 / p90 / p99", headings, rows, notes)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def draw_results(document: Document, figure: Any) -> None:
    """Latency against throughput: where a line turns upwards, the server has no more to give."""
    loads = [row for row in document["loads"] if row["failed"] < row["requests"]]
    throughput = [row["output_tokens_per_second"] for row in loads]
    panels = (
        ("Time to first token", "ttft_ms", "ms", 1.0),
        ("Between tokens", "itl_ms", "ms", 1.0),
        ("Whole answer", "e2e_ms", "s", 1e-3),
    )
    for axes, (title, name, unit, scale) in zip(figure.subplots(1, 3), panels, strict=True):
        for percentile, marker in zip(PERCENTILES, "osD", strict=True):
            values = [scale * row[name][percentile] for row in loads]
            axes.plot(throughput, values, marker=marker, label=percentile)
        for x, y, row in zip(throughput, values, loads, strict=True):
            axes.annotate(
                row["load"].replace(" requests", ""), (x, y), (0, 8), textcoords="offset points", ha="center",
                fontsize=9,
            )  # fmt: skip
        axes.set(title=title, xlabel="generated tokens/s", ylabel=unit)
        axes.margins(x=0.12, y=0.16)
        axes.set_ylim(bottom=0)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PERCENTILES))
