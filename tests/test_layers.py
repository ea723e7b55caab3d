"""Who may import whom: plain Python below, kernels and comms apart, frameworks above, launch on top."""

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# each may import those before it
PLAIN = [
    "values",
    "numeric",
    "packing",
    "machine",
    "spec",
    "crossing",
    "bands",
    "slices",
    "dealing",
    "balancing",
    "layout",
    "steps.reads",
    "steps.table",
    "steps.rank",
    "cost",
    "comms.axis",
    "ranks",
    "sizes",
    "transport",
    "planning",
    "mask",
    "steps.recipe",
    "footprint",
    "predict",
    "sharing",
    "simulation",
    "steps.spmd",
    "segments",
    "check.arguments",
    "check.attention",
    "check.linear",
    "check.cache",
    "serving",
]
LAZY = {"spec": ("ringattn.segment_ids",)}  # imported by the function that needs it


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
        wrong = [n for n in ours(path) if not within(n, "ringattn.kernels", "ringattn.spec") and n != "ringattn"]
        assert not wrong, f"{path} imports {wrong}"


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_modules_import_only_those_below_them_and_no_framework(name):
    path = ROOT / "ringattn" / f"{name.replace('.', '/')}.py"
    below = [f"ringattn.{n}" for n in PLAIN[: PLAIN.index(name)]] + ["ringattn.kernels"] * (
        name in ("steps.recipe", "steps.spmd")
    )
    wrong = [n for n in ours(path) if not within(n, *below, *LAZY.get(name, ()))]
    assert not wrong, f"{path} imports {wrong}"
    assert not {n.split(".")[0] for n in imports(path)} & {"torch", "jax", "triton"}, path


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
            if path.name in ("aot.py", "fa4.py"):  # libtpu and FA4 take some settings from the environment alone
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
    for name in ringattn.__all__:
        assert getattr(ringattn, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        ringattn.atention  # noqa: B018


def test_a_word_of_the_glossary_is_the_name_of_one_class():
    """Apart from JAX's rooms, which have torch's names, models, and a cache's slices of keys."""
    words = [
        line.split("|")[1].strip()
        for line in (ROOT / "docs/reference/glossary.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    names = {word.title().replace(" ", "") for each in words for word in each.split(",")}
    assert {"Plan", "Recipe", "Call", "Step", "Partial"} <= names
    places: dict[str, list[str]] = {}
    for path in (p for folder in ("ringattn", "comms", "kernels") for p in python_files(folder)):
        at = str(path.relative_to(ROOT))
        apart = "ringattn/models/", "ringattn/torch/inference/"
        if not at.startswith(apart) and "jax" not in at and "pallas" not in at:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and node.name in names:
                    places.setdefault(node.name, []).append(at)
    assert not {name: at for name, at in places.items() if len(at) > 1}


NO_LRU = ("one for each", "until the process ends", "1")  # what a plain dict or list may be


def caches(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The caches of a module, each with what its limit may be called."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        for how in map(ast.unparse, getattr(node, "decorator_list", [])):
            kind, size = how.split("(")[0], re.findall(r"maxsize=(\d+)", how)
            if kind in ("lru_cache", "cache", "cached"):
                yield node.name, tuple(size) or ({"lru_cache": "128", "cache": "one for each", "cached": "64"}[kind],)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = ast.unparse(node.value)
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            if "lru_cache" in value:
                yield name, tuple(re.findall(r"maxsize=(\d+)", value)) or ("128",)
            elif value in ("{}", "[]", "set()") or value.startswith("Weak"):
                yield name, ("weak: those that live",) if value.startswith("Weak") else NO_LRU


def test_the_table_of_caches_is_the_code():
    _, _, table = (ROOT / "docs/explanation/map.md").read_text().partition("| caches of functions and modules |")
    listed, path = {}, ""
    for row in table.splitlines()[2:]:
        _, names, _, most, _ = row.split("|")
        limits = [limit.strip().replace(",", "") for limit in most.split(";")]
        for i, group in enumerate(names.split(";")):
            for name in re.findall(r"`([^`]+)`", group):
                if name.endswith(".py"):
                    path = name
                else:
                    listed[path, name] = limits[min(i, len(limits) - 1)]
    files = [path for room in ("ringattn", "kernels", "comms") for path in (ROOT / room).rglob("*.py")]
    for path in {str(path.resolve().relative_to(ROOT.resolve())) for path in files}:
        for name, limits in caches(ROOT / path):
            assert path.startswith("launch") or listed.pop((path, name), "nothing") in limits, (path, name)
    assert not listed
