"""Recordings of the app on a page: which there are, and their HTML. `tools/app_recordings.py` makes the files."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

from app.presets import preset
from app.runs import Run, record

IMAGES = Path(__file__).resolve().parents[1] / "images"


@dataclass(frozen=True)
class Recording:
    """One side of a preset of the app, played from its first step to its last."""

    key: str  # of the preset
    side: int
    event: str  # the lesson's step is the first with it: a field of `StepTrace`, or "num_cached_tokens"
    words: str  # what is to be seen, for those who do not see it

    @property
    def name(self) -> str:
        return f"play-{self.key}"

    @cached_property
    def run(self) -> Run:
        chosen = preset(self.key)
        return record("", chosen.workload(self.side), is_static=chosen.sides[self.side].is_static)

    @property
    def num_steps(self) -> int:
        return len(self.run.traces)


RECORDINGS = (
    Recording(
        "preemption",
        0,
        "preempted",
        "Three requests fill a pool of twelve blocks. In step 11 no block is free: the youngest request gives way, its "
        "blocks return to the pool, and in the next step it is computed again, all 17 tokens at once.",
    ),
    Recording(
        "copy",
        0,
        "block_copies",
        "Four samples share the three blocks of one prompt. In the step of their first write three of them get a copy "
        "of the last, half-filled block; the fourth writes in place.",
    ),
    Recording(
        "prefix",
        1,
        "num_cached_tokens",
        "The first request computes a system prompt. The other three, one a step, find its four full blocks by their "
        "hash: the same blocks now carry the colours of all four.",
    ),
)


def lesson_step(recording: Recording) -> int:
    """Index of the step that the recording is about: the last in which its event happens."""
    happened = []
    for number, trace in enumerate(recording.run.traces):
        value = getattr(trace, recording.event)
        if any(value.values()) if isinstance(value, dict) else value:
            happened.append(number)
    return happened[-1]


def recording(key: str, caption: str, up: str = "../", words: str = "") -> str:
    """A figure with the recording, in the page's theme, and as a still for readers who want no motion.

    Args:
        key: of the preset.
        caption: what stands below.
        up: from the page to the folder that holds `images`.
        words: replaces the text alternative, on a page in another language.
    """
    found = next(entry for entry in RECORDINGS if entry.key == key)
    pictures = ""
    for suffix, only in (("", "#only-light"), ("-dark", "#only-dark")):
        width, height = webp_size(IMAGES / f"{found.name}{suffix}.webp")
        pictures += (
            f'<picture><source media="(prefers-reduced-motion: reduce)" '
            f'srcset="{up}images/{found.name}-still{suffix}.webp">'
            f'<img src="{up}images/{found.name}{suffix}.webp{only}" alt="{escape(words or found.words)}" '
            f'width="{width}" height="{height}" loading="lazy"></picture>'
        )
    return f'<figure class="tw-figure tw-recording">{pictures}<figcaption>{escape(caption)}</figcaption></figure>\n'


def webp_size(path: Path) -> tuple[int, int]:
    """Width and height of an animated WebP, from its header (VP8X: two numbers of 24 bits, less one each)."""
    head = path.read_bytes()[:30]
    if head[8:16] != b"WEBPVP8X":
        raise ValueError(f"{path.name} is no animated WebP; make it again with `make app-recordings`.")
    return struct.unpack("<I", head[24:27] + b"\0")[0] + 1, struct.unpack("<I", head[27:30] + b"\0")[0] + 1
