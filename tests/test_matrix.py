"""Every way in which people train, crossed: each cell equals one rank in its precision (tests/matrix.py)."""

import matrix
import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed (pip install '.[hf]')")
CELLS = [cell for cell in matrix.covering() if cell.integration != "SFT"]  # those are in test_trl.py
COMPILED = [cell for cell in CELLS if cell.compiled]
FEW = [*COMPILED[:5], COMPILED[7]]  # in which each choice of the other axes is compiled


@pytest.mark.slow
def test_cells_and_a_few_compiled_ones_equal_one_rank():
    print(matrix.check([cell for cell in CELLS if cell in FEW or not cell.compiled], tensor_parallel=True))


@pytest.mark.compile
def test_all_compiled_cells_equal_one_rank():
    print(matrix.check(COMPILED))


ON_GPUS = [
    matrix.Cell("prepare", "FSDP2 averaged", "mixed bf16", "checkpointing", "packed"),
    matrix.Cell("prepare", "DDP", "autocast bf16", "compile", "packed"),
    matrix.Cell("Trainer", "FSDP2 averaged", "mixed bf16", "kept", "padded"),
    matrix.Cell("accelerate", "FSDP2 averaged", "mixed bf16", "checkpointing", "whole"),
    matrix.Cell("compat", "FSDP2 summed", "bf16 weights", "kept", "packed"),
    matrix.Cell("attention", "FSDP2 averaged", "mixed bf16", "both", "padded"),
    matrix.Cell("nn", "DDP", "fp16 scaler", "kept", "whole"),
    matrix.Cell("nn", "FSDP2 summed", "float32", "checkpointing", "packed"),
]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
@pytest.mark.parametrize("libraries", [False, True])
def test_a_few_cells_over_nccl_equal_one_gpu(libraries):
    """By our kernels, and by those of libraries where they are installed."""
    print(matrix.check(ON_GPUS, device="cuda", libraries=libraries))
