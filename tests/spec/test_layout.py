"""The one-way rule between the packages, and the mirror between the tiers, read from the source with `ast`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIERS = ("reference", "fast")
SHARED = ("reference.contracts", "reference.frontend")


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_reference_never_imports_fast_or_torch() -> None:
    for path in python_files("reference"):
        for module in imported_modules(path):
            assert not any(is_within(module, name) for name in ("fast", "torch", "transformers")), (
                f"{path}: {module}"
            )


def test_fast_imports_nothing_of_reference_but_contracts_and_frontend() -> None:
    for path in python_files("fast"):
        for module in imported_modules(path):
            if is_within(module, "reference"):
                assert any(is_within(module, name) for name in SHARED), f"{path}: {module}"


def test_contracts_depend_on_nothing_else_of_the_project() -> None:
    for path in python_files("reference/contracts"):
        for module in imported_modules(path):
            assert not is_within(module, "reference") or is_within(module, "reference.contracts"), (
                f"{path}: {module}"
            )


def test_the_frontend_never_names_a_tier() -> None:
    """Not by import, and not as a string handed to importlib: tiers come from entry points."""
    for path in python_files("reference/frontend"):
        for module in imported_modules(path):
            if is_within(module, "reference"):
                assert any(is_within(module, name) for name in SHARED), f"{path}: {module}"
            assert not is_within(module, "fast"), f"{path}: {module}"
            assert not is_within(module, "importlib.import_module"), f"{path}: {module}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                assert name not in ("import_module", "__import__"), f"{path}:{node.lineno} imports by name"


def test_the_app_uses_nothing_of_the_project_but_contracts_and_frontend() -> None:
    """Tiers reach it as they reach anybody, through their entry points. Only its kernel view asks for the tracer."""
    for path in python_files("app"):
        for module in imported_modules(path):
            if path != ROOT / "app" / "kernel.py":
                assert not is_within(module, "fast"), f"{path}: {module}"
                assert not is_within(module, "torch"), f"{path}: {module}"
            if is_within(module, "reference"):
                assert any(is_within(module, name) for name in SHARED), f"{path}: {module}"


def test_only_the_kernels_module_imports_the_extension() -> None:
    for package in TIERS:
        for path in python_files(package):
            uses = [
                module
                for module in imported_modules(path)
                if module in ("fast._cpu", "fast._simt", "fast._simt_trace")
            ]
            assert not uses or path == ROOT / "fast" / "kernels.py", f"{path}: {uses}"


def test_nothing_that_is_read_or_received_can_be_code() -> None:
    for package in TIERS:
        for path in python_files(package):
            for module in imported_modules(path):
                assert module.split(".")[0] not in ("pickle", "marshal", "shelve", "dill"), (
                    f"{path}: {module}"
                )
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                    is_builtin = isinstance(node.func, ast.Name) and name in ("eval", "exec")
                    assert not is_builtin, f"{path}:{node.lineno} runs text"
                    assert name not in ("recv_pyobj", "send_pyobj"), f"{path}:{node.lineno} pickles"


def mirrored_files() -> list[str]:
    own = [path.relative_to(ROOT / "fast").as_posix() for path in python_files("fast")]
    return [name for name in own if (ROOT / "reference" / name).is_file()]


def public_signatures(path: Path) -> dict[str, tuple[str, ...]]:
    """Name -> parameter names, of public functions and of classes with their public methods and fields."""
    signatures: dict[str, tuple[str, ...]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                if node.name.startswith("_") and node.name not in ("__init__", "__call__"):
                    continue
                arguments = node.args
                names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
                signatures[prefix + node.name] = tuple(names)
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                fields = [
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                ]
                signatures[prefix + node.name] = tuple(fields)
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(path.read_text()).body, "")
    return signatures


def test_every_engine_file_of_one_tier_has_a_twin_in_the_other() -> None:
    expected = {
        "__init__.py", "__main__.py", "tier.py", "llm.py", "async_llm.py", "block_pool.py", "kv_cache_manager.py",
        "scheduler.py", "model_runner.py", "input_batch.py", "attention.py", "layers.py", "sampler.py",
        "models/__init__.py",
        "models/gpt2.py", "models/llama.py", "block_transfer.py", "request_table.py", "speculator.py",
    }  # fmt: skip
    assert set(mirrored_files()) == expected
    extra = {path.relative_to(ROOT / "fast").as_posix() for path in python_files("fast")} - expected
    extra = {name for name in extra if not name.startswith("bench/")}  # measures both tiers
    entrypoints = {f"entrypoints/{name}.py" for name in ("__init__", "openai/__init__", "openai/api_server")}
    assert extra - entrypoints == {
        "cores.py",
        "cpu_forward.py",
        "device_forward.py",
        "device_kernels.py",
        "device_memory.py",
        "kernel_trace.py",
        "kernels.py",
        "ladder.py",
        "models/weights.py",
    }


@pytest.mark.parametrize("name", mirrored_files())
def test_mirrored_files_have_the_same_public_names_and_parameters(name: str) -> None:
    assert public_signatures(ROOT / "fast" / name) == public_signatures(ROOT / "reference" / name)


@pytest.mark.parametrize(
    "name", [n for n in mirrored_files() if not n.startswith("__") and n not in ("llm.py", "tier.py")]
)
def test_a_fast_file_links_its_twin_in_the_docstring(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / "fast" / name).read_text())) or ""
    assert f"reference/{name}" in docstring


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_reference_loads_no_torch_and_using_its_scheduler_loads_no_numpy() -> None:
    run_python("import reference, sys; assert 'torch' not in sys.modules")
    run_python(
        "import reference.scheduler, reference.frontend.engine_core, sys; assert 'numpy' not in sys.modules"
    )
    run_python("from reference import LLM; import sys; assert 'torch' not in sys.modules")


def test_tests_are_neither_empty_nor_skipped_without_a_condition() -> None:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                real = [
                    item
                    for item in node.body
                    if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
                ]
                assert real, f"{path}: {node.name} is empty"
                assert not all(isinstance(item, ast.Pass) for item in real), f"{path}: {node.name} is empty"
            if isinstance(node, ast.Attribute) and node.attr in ("skip", "xfail"):
                assert "gpu" in path.parts, f"{path}:{node.lineno} skips"
