"""Print requirements of pyproject.toml, one a line: `build` for the build system, `core`, or the name of an extra.

pip cannot install a project's dependencies without the project itself, and ours needs its build tools first.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def requirements(group: str) -> list[str]:
    """The requirement strings of one group. Raises KeyError for an extra that pyproject.toml does not have."""
    content = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    if group == "build":
        return [*content["build-system"]["requires"], "cmake", "ninja"]
    if group == "core":
        return list(content["project"]["dependencies"])
    return list(content["project"]["optional-dependencies"][group])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print("\n".join(requirements(name)))
