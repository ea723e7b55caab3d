"""cuDNN's fused attention, through torch."""

import torch
from torch import Tensor

from ringattn.kernels.attention.libraries import cudnn_refusal as refuses
from ringattn.kernels.attention.libraries.rectangles import over_rectangles

ATTEND = torch._scaled_dot_product_cudnn_attention  # the same op as of torch.ops.aten, found sooner
GRADIENTS = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


def forward(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, causal: bool, *, scale: float, softcap: None = None
) -> tuple[Tensor, Tensor]:
    assert softcap is None  # which `refuses` refuses
    q, k, v = [x.transpose(1, 2) for x in (q_BTHD, k_BSGD, v_BSGV)]
    out, lse = ATTEND(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
    return out.transpose(1, 2), lse.reshape(out.shape[:3]).transpose(1, 2)


def backward(
    dout_BTHV: Tensor, q_BTHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, out_BTHV: Tensor, lse_BTH: Tensor, causal: bool,
    *, scale: float, softcap: None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if q_BTHD.shape[1] == k_BSGD.shape[1] == 1:  # cuDNN refuses one query of one key: pass it twice, with dout = 0
        zero = torch.zeros_like(dout_BTHV)
        twice = [torch.cat([x, y], 1) for x, y in ((dout_BTHV, zero), (q_BTHD, q_BTHD), (out_BTHV, zero))]
        lse_BTH = lse_BTH.repeat(1, 2, 1)
        dq, dk, dv = backward(twice[0], twice[1], k_BSGD, v_BSGV, twice[2], lse_BTH, False, scale=scale)
        return dq[:, :1], dk, dv
    dout, q, k, v, out = [x.transpose(1, 2) for x in (dout_BTHV, q_BTHD, k_BSGD, v_BSGV, out_BTHV)]
    lse = lse_BTH.transpose(1, 2).contiguous().unsqueeze(-1)
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # seed and offset of dropout
    lengths = (None, None, q.shape[2], k.shape[2])
    grads = GRADIENTS(dout, q, k, v, out, lse, unused, unused, None, *lengths, 0.0, causal, scale=scale)
    dq, dk, dv = [x.transpose(1, 2) for x in grads]
    return dq, dk, dv


KERNEL = over_rectangles("cuDNN", forward, backward, refuses, fills=True)
