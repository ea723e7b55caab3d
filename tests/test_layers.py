"""Who may import whom: plain Python below, kernels and comms apart, frameworks above, launch on top."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("masks", "layouts", "steps", "plans", "check")  # plain Python; each may import those before it


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever the import stands."""
    results = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            results |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.ImportFrom):
            results.add("relative import")
    return results


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name.split(".")[0] in ("ringattn", "relative import")}


def python_files(folder: str) -> list[Path]:
    return sorted(p for p in (ROOT / folder).rglob("*.py") if not p.is_symlink())


def within(name: str, *allowed: str) -> bool:
    return any(name == a or name.startswith(f"{a}.") for a in allowed)


def test_comms_import_nothing_of_the_project_but_comms():
    for path in python_files("comms"):
        wrong = [n for n in ours(path) if not within(n, "ringattn.comms")]
        assert not wrong, f"{path} imports {wrong}"


def test_kernels_import_only_kernels_and_spec():
    for path in python_files("kernels"):
        wrong = [n for n in ours(path) if not within(n, "ringattn.kernels", "ringattn.masks") and n != "ringattn"]
        assert not wrong, f"{path} imports {wrong}"


@pytest.mark.parametrize("room", ROOMS)
def test_plain_rooms_import_only_those_below_them_and_no_framework(room):
    below = [f"ringattn.{each}" for each in ROOMS[: ROOMS.index(room) + 1]]
    below += ["ringattn.kernels", "ringattn.comms.axis"] * (room == "plans")
    for path in python_files(f"ringattn/{room}"):
        wrong = [n for n in ours(path) if not within(n, *below) and n != "ringattn"]
        assert not wrong, f"{path} imports {wrong}"
        assert not {n.split(".")[0] for n in imports(path)} & {"torch", "triton"}, path
        assert path.name == "segment_ids.py" or "jax" not in {n.split(".")[0] for n in imports(path)}, path


def test_nobody_below_imports_launch_or_tests():
    for folder in ("ringattn", "comms", "kernels", "conf"):
        for path in python_files(folder):
            if path.name == "__main__.py":
                continue
            assert not [n for n in imports(path) if within(n, "ringattn.launch", "tests")], path


def test_nobody_imports_the_modules_with_other_libraries_names():
    for path in (p for folder in ("ringattn", "launch") for p in python_files(folder)):
        if "compat" not in path.relative_to(ROOT).parts:
            assert not [n for n in imports(path) if within(n, "ringattn.compat")], path


def test_models_stand_above_all_but_the_public_names_and_launch():
    for path in python_files("ringattn"):
        room, *_ = path.relative_to(ROOT / "ringattn").parts
        if room not in ("models", "compat", "__init__.py"):
            assert not [n for n in imports(path) if within(n, "ringattn.models")], path


def test_torch_and_jax_do_not_import_each_other():
    for mine, other in (("torch", "jax"), ("jax", "torch")):
        for path in python_files(f"ringattn/{mine}"):
            assert not [n for n in imports(path) if within(n, f"ringattn.{other}")], path


def test_configuration_and_environment_stop_at_launch():
    for folder in ("ringattn", "comms", "kernels"):
        for path in python_files(folder):
            text = path.read_text()
            if path.name == "fa4.py":  # it takes some settings from the environment alone
                continue
            assert "os.environ" not in text and "getenv" not in text, f"{path} reads the environment"


def test_links_make_one_import_namespace():
    for name in ("comms", "kernels", "launch", "conf"):
        link = ROOT / "ringattn" / name
        assert link.is_symlink() and link.resolve() == ROOT / name


def test_import_is_quick_and_brings_nothing_heavy():
    heavy = ["torch", "jax", "triton", "hydra", "ray", "transformers", "matplotlib"]
    code = f"import sys, ringattn; ringattn.__version__; print([m for m in {heavy} if m in sys.modules])"
    best = 9.0
    for _ in range(3):
        start = time.perf_counter()
        out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        best = min(best, time.perf_counter() - start)
        assert out.strip() == "[]"
    assert best < 0.3, f"import ringattn took {best:.2f} s"


def test_every_public_name_can_be_had():
    import ringattn

    assert sorted(ringattn.__all__) == sorted(ringattn.PUBLIC)
    assert {name for name in dir(ringattn) if not name.startswith("__")} == {*ringattn.__all__}
    for name in ringattn.__all__:
        assert getattr(ringattn, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        ringattn.atention  # noqa: B018
