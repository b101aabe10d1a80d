"""Pictures of the app, one of each lesson: `python tools/app_shots.py FOLDER [KEY...]`.

Each shows the step that its preset names. Besides `KEY.png` (light, 1600 pixels wide) there is `KEY-dark.png`; of the
first preset also a phone (390) and a projector (3840).
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from app.page import launch
from app.presets import PRESETS, Preset
from app.runs import record
from app.state import make_view
from tests.app.browser import open_browser, open_view

EVENTS = {"preempt": "pre", "copy": "copy", "hit": "hit", "draft": "draft"}
SIZES = {"": (1600, 1000, "light"), "-dark": (1600, 1000, "dark")}
MORE_SIZES = {"-phone": (390, 844, "light"), "-4k": (3840, 2160, "dark")}


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


def main(folder: Path, keys: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    blocks, address = launch(block=False)
    with open_browser() as browser:
        for chosen in PRESETS:
            if keys and chosen.key not in keys:
                continue
            for suffix, (width, height, theme) in (
                SIZES | (MORE_SIZES if chosen is PRESETS[0] else {})
            ).items():
                view = open_view(browser, address, width=width, height=height, theme=theme)
                if chosen is not PRESETS[0]:
                    view.choose_preset(chosen.title["en"])
                view.scrub(still_step(chosen))
                view.page.mouse.move(0, 0)
                view.page.evaluate("document.activeElement.blur()")
                path = folder / f"{chosen.key}{suffix}.png"
                save(view.page.screenshot(full_page=True), path)
                print(f"{path} ({path.stat().st_size // 1024} KB)")
                view.page.context.close()
    blocks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
