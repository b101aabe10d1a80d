"""What a long run costs in the browser: `python tools/app_step_time.py [STEPS [REQUESTS [PASSES]]]`.

A trace of so many steps with so many requests is loaded from its file in headless Chromium and stepped through, several
times: the first, the middle and the last 100 steps one by one, then 100 jumps to and fro. The page measures each step
with the performance API; the layout that follows is measured here. On a machine that has other things to do the least
of several passes of each step is closest to what the step itself costs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app.files import load_run
from app.page import launch
from app.state import make_page
from tests.app.browser import View, open_browser, open_view
from tests.app.test_browser import load, make_long_run

ROW = 100  # steps in a row, and jumps
LOADING_MS = 600_000
SCRUB = """async (steps) => {
  performance.clearMeasures('twinfer-step');
  const scrub = document.querySelector('.tw .scrub'), layouts = [];
  for (const step of steps) {
    scrub.value = step;
    scrub.dispatchEvent(new Event('input'));
    const drawn = performance.now();
    document.body.getBoundingClientRect();
    layouts.push(performance.now() - drawn);
    await new Promise((resolve) => requestAnimationFrame(resolve));
  }
  return [performance.getEntriesByName('twinfer-step').map((entry) => entry.duration), layouts];
}"""


def tell(name: str, times: list[float]) -> None:
    ordered = sorted(times)
    median, p95 = ordered[len(ordered) // 2], ordered[int(0.95 * len(ordered))]
    print(f"{name}: median {median:.1f} ms, 95th percentile {p95:.1f} ms, most {ordered[-1]:.1f} ms")


def rows(num_steps: int) -> list[int]:
    """The first, the middle and the last steps."""
    starts = (0, max(0, num_steps // 2), max(0, num_steps - ROW))
    return sorted({step for start in starts for step in range(start, min(start + ROW, num_steps))})


def jumps(num_steps: int) -> list[int]:
    """To and fro through the whole run; 7919 is prime, so that all of it is visited."""
    return [7919 * i % num_steps for i in range(1, ROW + 1)]


def measure(view: View, name: str, steps: list[int], num_passes: int) -> None:
    passes = [view.page.evaluate(SCRUB, steps) for _ in range(num_passes)]
    for what, which in (("script", 0), ("layout", 1)):
        least = list(map(min, zip(*(times[which] for times in passes), strict=True)))
        tell(f"{name}, {what}, least of {num_passes}", least)


def measure_loading(view: View, path: Path, num_steps: int) -> None:
    started = time.perf_counter()
    page = make_page([load_run(path)])
    print(
        f"python: {time.perf_counter() - started:.1f} s to read {path.stat().st_size / 1e6:.1f} MB into the page"
    )
    del page
    started = time.perf_counter()
    load(view, path)
    view.page.wait_for_function(
        "last => document.querySelector('.tw .scrub')?.max === last",
        arg=str(num_steps - 1),
        timeout=LOADING_MS,
    )
    print(f"loaded in the page: {time.perf_counter() - started:.1f} s")


def measure_memory(view: View) -> None:
    session = view.page.context.new_cdp_session(view.page)
    session.send("HeapProfiler.collectGarbage")
    session.send("Performance.enable")
    metrics = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
    print(f"memory of the page: {metrics['JSHeapUsedSize'] / 1e6:.0f} MB, {metrics['Nodes']:.0f} nodes")


def main(num_steps: int = 500, num_requests: int = 32, num_passes: int = 5) -> int:
    blocks, address = launch(block=False)
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        path = Path(folder) / "long.json"
        make_long_run(path, num_steps, num_requests)
        print(f"{num_steps} steps x {num_requests} requests")
        view = open_view(browser, address)
        view.page.set_default_timeout(LOADING_MS)
        measure_loading(view, path, num_steps)
        measure_memory(view)
        measure(view, "step by step", rows(num_steps), num_passes)
        measure(view, "jumps", jumps(num_steps), num_passes)
        measure_memory(view)
    blocks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
