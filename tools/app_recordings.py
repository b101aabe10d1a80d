"""Short looping recordings of the app for the tutorial: `python tools/app_recordings.py [KEY...]`.

A recording plays one side of a preset, a frame a step; the step that the lesson is about stays longer. It shows what is
said of the step, the block pool and the block tables. Written to docs/images, in light and in dark, each with a still
picture of the lesson's step for readers who want no motion. `docs/support/recordings.py` puts them on a page.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app.page import launch
from app.presets import preset
from docs.support.recordings import IMAGES, RECORDINGS, Recording, lesson_step
from tests.app.browser import View, open_browser, open_view

WIDTH = 820  # of the window; the column of a page is 690 wide
STEP_MS, LESSON_MS, LAST_MS = 1100, 3200, 2400
# Only the pane that is recorded, and of it what changes from step to step.
ONLY_PANE = """
.tw .head, .tw .facts, .tw .partings, .tw .foot, .tw .pane:not(:nth-child({number})),
.tw .name, .tw .budget, .tw .key, .tw .info, .tw .queuecard, .tw .timecard {{ display: none !important; }}
.tw .controls {{ position: absolute; left: -3000px; }}
.tw .panes {{ display: block; margin: 0; }}
.tw .pane {{ padding: 12px 14px 2px; background: var(--bg); }}
.tw .say {{ font-size: 20px; min-height: 1.6em; }}
.tw .why {{ min-height: 58px; }}
.tw .tablecard {{ min-height: {height}px; }}
"""


def frames(view: View, recording: Recording) -> list[Image.Image]:
    """A picture of each step, all of one size: as high as the highest needs."""
    chosen = preset(recording.key)
    view.choose_preset(chosen.title["en"])
    style = ONLY_PANE.format(number=recording.side + 1, height=0)
    view.page.add_style_tag(content=style)
    pane = view.find(".pane").nth(recording.side)
    heights = []
    for step in range(recording.num_steps):
        view.scrub(step)
        heights.append(pane.locator(".tablecard").evaluate("node => node.offsetHeight"))
    view.page.add_style_tag(content=ONLY_PANE.format(number=recording.side + 1, height=max(heights)))
    pictures = []
    for step in range(recording.num_steps):
        view.scrub(step)
        view.page.mouse.move(0, 0)
        pictures.append(Image.open(io.BytesIO(pane.screenshot())).convert("RGB"))
    width = max(picture.width for picture in pictures)
    height = max(picture.height for picture in pictures)
    ground = pictures[0].getpixel((2, 2))
    return [_padded(picture, (width, height), ground) for picture in pictures]


def _padded(picture: Image.Image, size: tuple[int, int], ground: object) -> Image.Image:
    padded = Image.new("RGB", size, ground)  # type: ignore[arg-type]
    padded.paste(picture)
    return padded


def save(pictures: list[Image.Image], recording: Recording, suffix: str) -> None:
    """Without loss: letters stay sharp, and of flat areas that hardly change little remains to be stored."""
    lesson = lesson_step(recording)
    times = [LESSON_MS if step == lesson else STEP_MS for step in range(len(pictures))]
    times[-1] = max(times[-1], LAST_MS)
    path = IMAGES / f"{recording.name}{suffix}.webp"
    pictures[0].save(
        path, save_all=True, append_images=pictures[1:], duration=times, loop=0, lossless=True, quality=60,
        method=4, minimize_size=True,
    )  # fmt: skip
    pictures[lesson].save(
        IMAGES / f"{recording.name}-still{suffix}.webp", lossless=True, quality=60, method=4
    )
    print(f"{path} ({len(pictures)} frames, {path.stat().st_size // 1024} KB)")


def record(browser: Browser, address: str, recording: Recording) -> None:
    for theme, suffix in (("light", ""), ("dark", "-dark")):
        view = open_view(browser, address, width=WIDTH, height=900, theme=theme)
        save(frames(view, recording), recording, suffix)
        view.page.context.close()


def main(keys: list[str]) -> int:
    blocks, address = launch(block=False)
    with open_browser() as browser:
        for recording in RECORDINGS:
            if not keys or recording.key in keys:
                record(browser, address, recording)
    blocks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
