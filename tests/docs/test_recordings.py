"""Recordings of the visualiser show today's runs, are small, and stand still for readers who want no motion."""

from __future__ import annotations

import re

import pytest
from PIL import Image

from docs.support import recordings
from docs.support.recordings import IMAGES, RECORDINGS, Recording, lesson_step, recording

MOST_BYTES = 400_000


@pytest.mark.parametrize("suffix", ["", "-dark"])
@pytest.mark.parametrize("found", RECORDINGS, ids=lambda found: found.key)
def test_a_recording_has_a_frame_for_each_step_of_today_s_run(found: Recording, suffix: str) -> None:
    path = IMAGES / f"{found.name}{suffix}.webp"
    assert path.stat().st_size < MOST_BYTES
    with Image.open(path) as picture:
        assert picture.n_frames == found.num_steps  # type: ignore[attr-defined]
        assert picture.info["loop"] == 0
        assert recordings.webp_size(path) == picture.size
        size = picture.size
    with Image.open(IMAGES / f"{found.name}-still{suffix}.webp") as still:
        assert still.size == size
        assert getattr(still, "n_frames", 1) == 1


def test_what_the_text_alternatives_say_is_what_happens() -> None:
    preemption, copy, prefix = RECORDINGS
    steps = preemption.run.traces
    assert lesson_step(preemption) == 11
    assert (len(steps[11].preempted), steps[12].budget_used) == (1, 17)
    pool = steps[0].state.cache
    assert pool.num_free_blocks + len(pool.ref_counts) == 12
    assert [
        len(copy.run.traces[0].state.cache.ref_counts),
        len(copy.run.traces[lesson_step(copy)].block_copies),
    ] == [3, 3]
    hits = [list(trace.num_cached_tokens.values()) for trace in prefix.run.traces[:4]]
    assert hits == [[0], [16], [16], [16]]
    assert [prefix.run.traces[3].state.cache.ref_counts[block] for block in (1, 2, 3, 4)] == [4, 4, 4, 4]


def test_the_figure_has_words_a_still_and_a_picture_for_either_theme() -> None:
    figure = recording("copy", "Four samples", up="../../")
    assert figure.count('media="(prefers-reduced-motion: reduce)"') == 2
    named = re.findall(r'(?:src|srcset)="\.\./\.\./images/([\w.-]+)(#only-(?:light|dark))?"', figure)
    assert [suffix for _, suffix in named] == ["", "#only-light", "", "#only-dark"]
    assert all((IMAGES / name).is_file() for name, _ in named)
    assert figure.count('alt="Four samples share the three blocks') == 2


def test_a_still_picture_is_not_taken_for_a_recording() -> None:
    with pytest.raises(ValueError, match="play-copy-still.webp is no animated WebP; make it again"):
        recordings.webp_size(IMAGES / "play-copy-still.webp")
