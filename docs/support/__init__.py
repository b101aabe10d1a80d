"""What the pages are made with: code from the files, runs of the real engine, and pictures of their traces.

Pages call these functions in `python exec="1"` blocks while the site is built, so a page cannot show code that is not
there, or a number that nobody measured.
"""

from docs.support.pictures import budget_bars, pool_picture, timeline
from docs.support.runs import run, steps_table
from docs.support.source import source

__all__ = ["budget_bars", "pool_picture", "run", "source", "steps_table", "timeline"]
