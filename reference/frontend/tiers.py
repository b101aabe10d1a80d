"""Finding the implementations: the front end receives a `Tier` and never names the module it came from."""

from __future__ import annotations

from importlib.metadata import entry_points

from reference.contracts.protocols import Tier

GROUP = "twinfer.tiers"


def available_tiers() -> list[str]:
    """Names of the installed tiers, sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def load_tier(name: str) -> Tier:
    """The tier registered under `name`.

    Raises:
        ValueError: there is none of that name, or it cannot be imported (the extension is not built, torch is missing).
    """
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            try:
                tier: Tier = entry.load()
            except ImportError as error:
                raise ValueError(f"The tier {name!r} cannot be loaded: {error}") from error
            return tier
    names = ", ".join(available_tiers()) or "none; install the package with `pip install -e .`"
    raise ValueError(f"There is no tier {name!r}; installed: {names}.")


def pick_tier(name: str | None) -> Tier:
    """The named tier; without a name, fast if it is installed and can run here, else reference."""
    if name is not None:
        return load_tier(name)
    if "fast" in available_tiers():
        fast = load_tier("fast")
        if fast.why_unavailable() is None:
            return fast
    return load_tier("reference")
