"""Of a table of kernels the first one that serves is taken, whatever is wrong with the others."""

from dataclasses import replace

import pytest

from ringattn.kernels import TABLE, Kernel, Problem, select

PROBLEM = Problem("cpu", "float32", 64, 64, heads=4, kv_heads=2)


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A kernel whose package is installed and raises when it is imported."""
    imported = f"open({str(tmp_path / 'imported')!r}, 'w').close()\n"
    (tmp_path / "kernel_of_a_broken_package.py").write_text(imported + "raise AttributeError('no such op')")
    monkeypatch.syspath_prepend(tmp_path)
    return Kernel("broken", "kernel_of_a_broken_package")


def test_a_package_that_cannot_be_imported_is_one_kernel_less(broken):
    missing, serves = Kernel("missing", "no_such_package"), Kernel("reference", "ringattn.kernels.attention.reference")
    table = (broken, missing, serves)
    assert select(PROBLEM, table=table) is serves
    why = {"broken": "cannot be imported: AttributeError: no such op", "missing": "no_such_package is not installed"}
    assert {kernel.name: kernel.refuses(PROBLEM) for kernel in table} == {**why, "reference": None}
    with pytest.raises(NotImplementedError):
        select(PROBLEM, "broken", table)


@pytest.mark.parametrize(("rectangles", "asked"), [(True, ["sdpa_cpu"]), (False, ["sdpa_cpu", "tiled"])])
def test_a_cpu_imports_no_kernel_of_a_gpu(rectangles, asked, broken, tmp_path):
    problem = Problem("cpu", "float32", 64, 64, heads=5, kv_heads=1, rectangles=rectangles)
    table = tuple(kernel if kernel.name in asked else replace(kernel, module=broken.module) for kernel in TABLE)
    assert select(problem, table=table).name == asked[-1] and not (tmp_path / "imported").exists()
