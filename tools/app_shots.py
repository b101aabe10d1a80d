"""Pictures of the app, one of each lesson and view: `python tools/app_shots.py FOLDER [KEY...]`.

Each lesson shows the step that its preset names; `whatif`, `live`, `kernel` and `kernel-vectorised` are the other
views. Besides `KEY.png` (light, 1600 pixels wide) there is `KEY-dark.png`; of the first preset and the other views also
a phone (390), and of the first preset a projector (3840).
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app.kernel import Problem, make_kernel_page
from app.page import launch
from app.presets import PRESETS, Preset, preset
from app.runs import record
from app.state import make_view
from tests.app.browser import View, open_browser, open_view
from tests.app.test_live import server_to_watch

EVENTS = {"preempt": "pre", "copy": "copy", "hit": "hit", "draft": "draft"}
SIZES = {"": (1600, 1000, "light"), "-dark": (1600, 1000, "dark")}
PHONE = {"-phone": (390, 844, "light")}
PROJECTOR = {"-4k": (3840, 2160, "dark")}


def still_step(chosen: Preset) -> int:
    """The step that a picture of the preset shows: the last of its event's, or one in the middle."""
    last = len(chosen.sides) - 1
    run = record("", chosen.workload(last), is_static=chosen.sides[last].is_static)
    event = EVENTS.get(chosen.stop_at)
    found = [number for number, step in enumerate(make_view(run)["steps"]) if event in step]
    return found[-1] if found else len(run.traces) // 2


def save(png: bytes, path: Path) -> None:
    """With 256 colours: a page of flat areas looks the same and takes a third."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)


def show_preset(view: View, chosen: Preset) -> None:
    if chosen is not PRESETS[0]:
        view.choose_preset(chosen.title["en"])
    view.scrub(still_step(chosen))


def show_fork(view: View) -> None:
    """The urgent request, had the policy changed when it came."""
    view.choose_preset(preset("priority").title["en"])
    view.scrub(3)
    view.find(".whatifbtn").click()
    view.find(".whatif select.what").select_option("scheduling_policy")
    view.find(".whatif .go").click()
    view.page.wait_for_function("() => document.querySelector('.tw h2').textContent.startsWith('What if')")
    view.wait_for_status("Done")
    view.scrub(8)


def show_live(view: View) -> None:
    """A server at work: eight conversations, of which some share their beginning."""
    with server_to_watch(num_usable_blocks=120) as server:
        view.page.locator("#details button").first.click()
        view.page.locator("#watch-url input, #watch-url textarea").fill(server.url)
        view.page.locator("#watch").click()
        view.wait_for_status("connected")
        view.page.locator("#details button").first.click()
        bodies = [
            {"prompt": [5] * 24 + [9 + i % 4] * (4 * i + 3), "max_tokens": 40 + 9 * i, "ignore_eos": True}
            for i in range(8)
        ]
        threads = [threading.Thread(target=server.post, args=("/v1/completions", body)) for body in bodies]
        for thread in threads:
            thread.start()
            time.sleep(0.15)
        view.page.wait_for_function("() => +document.querySelector('.tw .scrub')?.max > 60")
        view.scrub(58)
        view.page.locator("#cancel").click()
        for thread in threads:
            thread.join()


def show_kernel(view: View, rung: str, array: str) -> None:
    """The first access of the rung to a cache, or the middle of its reduction."""
    view.page.get_by_role("tab", name="Kernel").click()
    view.page.wait_for_selector("#kernel-viewer .kcards")
    view.page.locator(f'#kernel-viewer [data-rung="{rung}"] button').click()
    view.page.wait_for_function(
        "rung => document.querySelector('#kernel-viewer .chosen')?.dataset.rung === rung", arg=rung
    )
    page = make_kernel_page(rung, Problem())
    index = next(i for i, entry in enumerate(page["arrays"]) if entry["name"] == array)
    events = [i for i, event in enumerate(page["events"]) if event[7] == index and event[3] == "read"]
    view.page.locator("#kernel-viewer .scrub").fill(str(events[len(events) // 2]))


VIEWS: dict[str, Callable[[View], None]] = {
    "whatif": show_fork,
    "live": show_live,
    "kernel": partial(show_kernel, rung="v2_shared_reduce", array="k_cache"),
    "kernel-vectorised": partial(show_kernel, rung="v3_vectorised", array="v_cache"),
}


def main(folder: Path, keys: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    shows = {chosen.key: partial(show_preset, chosen=chosen) for chosen in PRESETS} | VIEWS
    blocks, address = launch(block=False)
    with open_browser() as browser:
        for key, show in shows.items():
            if keys and key not in keys:
                continue
            sizes = SIZES | (PHONE | PROJECTOR if key == PRESETS[0].key else PHONE if key in VIEWS else {})
            for suffix, (width, height, theme) in sizes.items():
                view = open_view(browser, address, width=width, height=height, theme=theme)
                show(view)
                view.page.mouse.move(0, 0)
                view.page.evaluate("document.activeElement.blur()")
                path = folder / f"{key}{suffix}.png"
                save(view.page.screenshot(full_page=True), path)
                print(f"{path} ({path.stat().st_size // 1024} KB)")
                view.page.context.close()
    blocks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
