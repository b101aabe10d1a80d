"""Pictures of benchmarks, in the colours of the site (docs/assets/site.css), dark on white."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Draw = Callable[[Any], None]  # draws on a matplotlib figure

_INK, _MUTED, _LINE = "#1b2733", "#5d6b7a", "#c3ccd6"
# Okabe and Ito's colour-blind-safe set, without the yellow, which white swallows.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")


def load_matplotlib() -> Any:
    """pyplot, drawing into files. Raises ValueError when it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--save needs matplotlib: pip install 'twinfer[bench]'.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_picture(path: Path, draw: Draw) -> None:
    """Write a PNG of what `draw` draws. Raises ValueError without matplotlib."""
    plt = load_matplotlib()
    style = {
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _LINE,
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.prop_cycle": plt.cycler(color=_COLOURS),
        "grid.color": "#e6eaef",
        "xtick.color": _MUTED,
        "ytick.color": _MUTED,
        "legend.frameon": False,
    }
    with plt.rc_context(style):
        figure = plt.figure(figsize=(11, 4.2), layout="constrained", facecolor="white")
        draw(figure)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def bars(axes: Any, title: str, labels: Sequence[str], values: Sequence[float], unit: str) -> None:
    """Horizontal bars, the first on top, each with its number: names are long and stay readable."""
    places = range(len(labels))
    drawn = axes.barh(places, values, color=_COLOURS[0], height=0.62)
    axes.bar_label(drawn, labels=[f"{value:,.4g}" for value in values], padding=4, color=_INK)
    axes.set_yticks(places, labels, color=_INK)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(title=title, xlabel=unit, xlim=(0, max([*values, 1e-9]) * 1.18))


def curves(
    axes: Any, title: str, x: Sequence[float], lines: Mapping[str, Sequence[float]], xlabel: str, ylabel: str
) -> None:
    """One line a name over x, every x with its own tick."""
    places = range(len(x))
    for (name, values), marker in zip(lines.items(), "osD^vP", strict=False):
        axes.plot(places, values, marker=marker, label=name)
    axes.set_xticks(places, [f"{value:g}" for value in x])
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, ylim=(0, None))
    if len(lines) > 1:
        axes.legend()
