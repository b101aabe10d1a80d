"""Which chapter to read before an exercise, and so which exercises stand at the end of a chapter."""

from __future__ import annotations

from reference.frontend.learn import find_exercises, find_folder

CHAPTERS = {
    "01": "kv-cache.md",
    "02": "model-runner.md",
    "03": "kv-cache.md",
    "04": "kv-cache.md",
    "05": "prefix-caching.md",
    "06": "prefix-caching.md",
    "07": "kv-cache.md",
    "08": "prefix-caching.md",
    "09": "scheduler.md",
    "10": "why-serving-is-hard.md",
    "11": "chunked-prefill.md",
    "12": "preemption.md",
    "13": "preemption.md",
    "14": "copy-on-write.md",
    "15": "tokens.md",
    "16": "tokens.md",
    "17": "determinism.md",
    "18": "sampling.md",
    "19": "sampling.md",
    "20": "speculation.md",
    "21": "speculation.md",
    "22": "guided-decoding.md",
    "23": "flash-attention.md",
    "24": "paged-attention.md",
    "25": "paged-attention-ladder.md",
    "26": "reductions.md",
    "27": "races.md",
    "28": "memory-wall.md",
    "29": "measuring.md",
    "30": "planted-bugs.md",
}


def exercises_of(page: str) -> str:
    """A Markdown list of the exercises of a page, "scheduler.md"; empty when it has none."""
    lines = [
        f"- [{exercise.number} {exercise.title}](exercises.md): `twinfer learn {exercise.number}`"
        for exercise in find_exercises(find_folder())
        if CHAPTERS[exercise.number] == page
    ]
    return "\n".join(lines)
