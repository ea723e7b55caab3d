"""A few tokens of linear attention on a state, one after the other, in one kernel: what generation runs.

    B batch   T new tokens   G key heads   H value heads   K key dim   V value dim

The state is read and written once, which is most of the work: torch alone reads and writes it in every operation.
"""

import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.linear.maps import Inputs
from ringattn.kernels.linear.triton.gated import Config
from ringattn.kernels.linear.triton.gated_states import CHANNEL, HEAD, NO_GATE
from ringattn.kernels.triton import cdiv, launch, power_of_2

COLUMNS = 16  # value channels of a program
CUT = Config(256, COLUMNS, 2, 1)


@triton.jit(do_not_specialize=["T"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, end_ptr, out_ptr,
    q_st, k_st, v_st, g_st, beta_st, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    GATE: tl.constexpr, GROUP: tl.constexpr, BETA: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of the state of one head, and of the outputs of T tokens.

    Programs: one for each tile of columns, head and batch row. The state is loaded, and stored after a loop over the
    tokens: decay, what k reads (with BETA), what is written, what q reads. All sums over the key channels are within
    the program, in float32.
    """
    column = tl.program_id(0) * BLOCK_V
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, j = tl.arange(0, BLOCK_K), column + tl.arange(0, BLOCK_V)
    at = (b * H + h) * (K * V) + i[:, None] * V + j[None, :]
    inside = (i < K)[:, None] & (j < V)[None, :]
    state = tl.load(state_ptr + at, mask=inside, other=0.0)
    for t in tl.range(0, T):
        of_key = b * q_st[0] + t * q_st[1] + h // GROUP * q_st[2]
        q = tl.load(q_ptr + of_key + i * q_st[3], mask=i < K, other=0.0).to(tl.float32)
        of_key = b * k_st[0] + t * k_st[1] + h // GROUP * k_st[2]
        k = tl.load(k_ptr + of_key + i * k_st[3], mask=i < K, other=0.0).to(tl.float32)
        u = tl.load(v_ptr + b * v_st[0] + t * v_st[1] + h * v_st[2] + j * v_st[3], mask=j < V, other=0.0).to(tl.float32)
        of_gate = g_ptr + b * g_st[0] + t * g_st[1] + h * g_st[2]
        if GATE == CHANNEL:
            state *= tl.exp(tl.load(of_gate + i * g_st[3], mask=i < K, other=0.0).to(tl.float32))[:, None]
        elif GATE == HEAD:
            state *= tl.exp(tl.load(of_gate).to(tl.float32))
        if BETA:
            beta = tl.load(beta_ptr + b * beta_st[0] + t * beta_st[1] + h * beta_st[2]).to(tl.float32)
            u = beta * (u - tl.sum(k[:, None] * state, 0))
        state += k[:, None] * u[None, :]
        out = scale * tl.sum(q[:, None] * state, 0)
        tl.store(out_ptr + ((b * T + t) * H + h) * V + j, out, mask=j < V)
    tl.store(end_ptr + at, state, mask=inside)


def decode(x: Inputs, start: Tensor) -> tuple[Tensor, Tensor]:
    """`recurrent` without documents and gradients: out [B, T, H, V] and the state behind the tokens, in float32."""
    assert x.begin is None
    B, T, H, V = x.v.shape
    G, K = x.k.shape[2:]
    gate = NO_GATE if x.g is None else CHANNEL if x.g.dim() == 4 else HEAD
    g, beta = (x.q if t is None else t for t in (x.g, x.beta))
    start = start.contiguous()
    out, end = start.new_empty(B, T, H, V), start.new_empty(start.shape)
    strides = (*[t.stride() for t in x[:3]], (*g.stride(), 0)[:4], beta.stride()[:3])
    launch(
        decode_kernel, (cdiv(V, COLUMNS), H, B), (x.q, x.k, x.v, g, beta, start, end, out),
        (*strides, T, H, x.scale), CUT,
        K=K, V=V, BLOCK_K=power_of_2(K), BLOCK_V=COLUMNS, GATE=gate.value, GROUP=H // G, BETA=x.beta is not None,
    )  # fmt: skip
    return out, end
