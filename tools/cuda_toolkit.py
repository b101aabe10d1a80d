"""nvcc and the disassembler that the static checks of the CUDA kernels use: `python tools/cuda_toolkit.py`.

Prints the path of nvcc; exit status 1 when there is none of the release that tests/kernels/budgets.toml was measured
with. Another release allots registers in another way, so a machine with an older or newer toolkit gets this one from
packages beside it (`tools/setup.sh nvcc`, into .venv/cuda).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = "13.0"
PACKAGED = ROOT / ".venv" / "cuda" / "nvidia" / "cu13"


@dataclass(frozen=True)
class Toolkit:
    """`folder` goes in front of PATH: cuobjdump looks for nvdisasm there."""

    nvcc: Path
    cuobjdump: Path
    folder: Path

    def environment(self) -> dict[str, str]:
        """The environment for every call of the toolkit. The packages have lib/ where nvcc looks for lib64/."""
        found = dict(os.environ)
        found["PATH"] = f"{self.folder}{os.pathsep}{found.get('PATH', '')}"
        libraries = [str(self.folder.parent / "lib"), found.get("LIBRARY_PATH", "")]
        found["LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
        return found


def release(nvcc: Path) -> str:
    """`13.0` of nvcc 13.0.88; empty when it does not run."""
    try:
        text = subprocess.run([nvcc, "--version"], check=False, capture_output=True, text=True).stdout
    except OSError:
        return ""
    match = re.search(r"release (\d+\.\d+)", text)
    return match.group(1) if match else ""


def toolkit_of(nvcc: Path) -> Toolkit | None:
    """The toolkit around one nvcc: None if it is not there, of another release, or comes without a disassembler."""
    path = f"{nvcc.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    cuobjdump, nvdisasm = (shutil.which(name, path=path) for name in ("cuobjdump", "nvdisasm"))
    if cuobjdump is None or nvdisasm is None or release(nvcc) != RELEASE:
        return None
    return Toolkit(nvcc, Path(cuobjdump), nvcc.parent)


def find_toolkit() -> Toolkit | None:
    """The first that will do: CUDACXX, the nvcc on PATH, the one in .venv/cuda."""
    named = [os.environ.get("CUDACXX"), shutil.which("nvcc"), str(PACKAGED / "bin" / "nvcc")]
    found = (toolkit_of(Path(nvcc)) for nvcc in named if nvcc)
    return next((toolkit for toolkit in found if toolkit), None)


def main() -> int:
    toolkit = find_toolkit()
    if toolkit is None:
        print(f"no nvcc {RELEASE} with cuobjdump and nvdisasm: run tools/setup.sh nvcc", file=sys.stderr)
        return 1
    print(toolkit.nvcc)
    return 0


if __name__ == "__main__":
    sys.exit(main())
