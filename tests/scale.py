"""How much the random tests do. `make test` takes the defaults, `make test-long` raises them through the environment.

TWINFER_FUZZ_WORKLOADS   workloads on tiny random models                     300, and 5,000 in the long run
TWINFER_RULE_STEPS       steps of the property machine over both schedulers  20,000, and 1,000,000
"""

from __future__ import annotations

import os


def _from_environment(name: str, default: int) -> int:
    value = os.environ.get(name, "").strip()
    if not value:
        return default
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{name} must be a whole number above 0, got {value!r}.")
    return int(value)


FUZZ_WORKLOADS = _from_environment("TWINFER_FUZZ_WORKLOADS", 300)
RULE_STEPS = _from_environment("TWINFER_RULE_STEPS", 20_000)
STEPS_AN_EXAMPLE = 50  # hypothesis restarts the machine after so many rules
