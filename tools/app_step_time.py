"""What a step costs in the browser: `python tools/app_step_time.py [STEPS [REQUESTS [PASSES]]]`.

A trace of so many steps with so many requests is scrubbed through from the first step to the last, several times, in
headless Chromium; the page measures each step with the performance API. On a machine that has other things to do the
least of several passes of each step is closest to what the step itself costs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app.page import launch
from tests.app.browser import View, open_browser, open_view
from tests.app.test_browser import load, make_long_run

SCRUB = """async () => {
  performance.clearMeasures('twinfer-step');
  const scrub = document.querySelector('.tw .scrub');
  for (let step = 0; step <= +scrub.max; step++) {
    scrub.value = step;
    scrub.dispatchEvent(new Event('input'));
    await new Promise((resolve) => requestAnimationFrame(resolve));
  }
  return performance.getEntriesByName('twinfer-step').map((entry) => entry.duration);
}"""


def tell(name: str, times: list[float]) -> None:
    ordered = sorted(times)
    median, p95 = ordered[len(ordered) // 2], ordered[int(0.95 * len(ordered))]
    print(f"{name}: median {median:.1f} ms, 95th percentile {p95:.1f} ms, most {ordered[-1]:.1f} ms")


def measure(view: View, num_passes: int) -> None:
    passes: list[list[float]] = [view.page.evaluate(SCRUB) for _ in range(num_passes)]
    for number, times in enumerate(passes, start=1):
        tell(f"pass {number}", times)
    tell(f"least of {num_passes} passes", list(map(min, zip(*passes, strict=True))))


def main(num_steps: int = 500, num_requests: int = 32, num_passes: int = 5) -> int:
    blocks, address = launch(block=False)
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        path = Path(folder) / "long.json"
        make_long_run(path, num_steps, num_requests)
        view = open_view(browser, address)
        load(view, path)
        view.page.wait_for_function(
            "last => document.querySelector('.tw .scrub')?.max === last",
            arg=str(num_steps - 1),
            timeout=300_000,
        )
        print(f"{num_steps} steps x {num_requests} requests")
        measure(view, num_passes)
    blocks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
