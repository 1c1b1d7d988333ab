"""Marlin's MoE kernels, as vLLM ships them, as a rival of products with 4-bit weights and of a layer in MXFP4.

Weights, scales and biases are put into Marlin's order before timing, N filled up to a multiple of 128, as its wide
tiles want. A product's rows are aligned to its blocks before timing, a layer's on every call. Of the heights of a block
the fastest is taken.

Where bits lie: 16 of K by 64 of N are 128 words; word 4 · lane + warp has the eight values that a lane of a 16-bit
matrix product needs of columns 16 · warp … 16 · warp + 15.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from expertile.device import Device
from expertile.formats.int4.weight import Int4Weight
from expertile.lab.operators import products
from expertile.lab.operators._binds import compiled_for
from expertile.lab.operators._plain import Weight, codes, fastest, scales
from expertile.lab.operators._supports import load
from expertile.lab.race.operator import Call, Supports, Workload
from expertile.ops.gathered_mm.activation import activate, split

FILES = ("moe.so", "vllm/_moe_C_stable_libtorch.abi3.so")
BLOCKS = (8, 16, 32, 48, 64)  # rows of a group that a tile has
_TILE_N = 128
_ROWS_OF_BLOCK = 0.9  # vLLM's choice: the lowest block that a group fills to less than that


def _type_id(exponent: int, mantissa: int, signed: int, bias: int, finite: int, nan: int) -> int:
    """vLLM's number for a scalar type: these fields, in 8, 8, 1, 32, 1 and 8 bits."""
    return exponent | mantissa << 8 | signed << 16 | bias << 17 | finite << 49 | nan << 50


UINT4_LESS_8 = _type_id(0, 4, 0, 8, 0, 1)
E2M1 = _type_id(2, 1, 1, 0, 1, 0)


def supports(*dims: str) -> Supports:
    """Of products whose K are these dims."""

    def why_not(w: Workload, device: Device) -> str | None:
        if not device.at_least(8):
            return "needs compute capability 8.0 or later"
        odd = [w[k] for k in dims if w[k] % 64]
        return f"K must be a multiple of 64, got {odd[0]}" if odd else None

    return why_not


def repack(values: Tensor) -> Tensor:
    """uint8 [N, K], 0 … 15 -> int32 [K/16, 2N], N a multiple of 64."""
    n, k = values.shape
    tiles = values.reshape(n // 64, 4, 2, 8, k // 16, 2, 4, 2)  # tile, warp, half, column; tile, half, lane, pair
    nibbles = tiles.permute(4, 0, 3, 6, 1, 7, 2, 5).reshape(-1, 8).int()
    word = nibbles[:, 0].clone()
    for i in range(1, 8):
        word |= nibbles[:, i] << 4 * i
    return word.view(k // 16, 2 * n)


def permuted_scales(of_groups: Tensor, halves: bool) -> Tensor:
    """[K / group_size, N], in Marlin's order of columns: that of a lane's 8 columns out of 64 together. `halves`: four
    neighbours are then exchanged as its conversion of 8-bit scales wants them. The scales of one group of all of K
    multiply its results instead, in the order of biases."""
    if len(of_groups) == 1:
        return permuted_bias(of_groups)
    moved = of_groups.reshape(-1, 8, 8).transpose(1, 2).contiguous()
    if halves:
        moved = moved.view(-1, 2, 2).transpose(1, 2).contiguous()
    return moved.view(of_groups.shape)


def permuted_bias(bias: Tensor) -> Tensor:
    """[…, N]."""
    return bias.reshape(-1, 4, 4, 2).transpose(1, 2).reshape(bias.shape).contiguous()


class Prepared:
    """A weight [G, N, K] in Marlin's order, and its product."""

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        groups, self.n, self.k = weight.shape
        self.padded_n = -(-self.n // _TILE_N) * _TILE_N
        more, int4 = self.padded_n - self.n, isinstance(weight, Int4Weight)
        of_groups = F.pad(scales(weight).transpose(1, 2), (0, more))
        self.words = torch.stack([repack(F.pad(codes(weight, g), (0, 0, 0, more))) for g in range(groups)])
        self.scales = torch.stack([permuted_scales(s.contiguous(), not int4) for s in of_groups])
        if not int4:
            self.scales = self.scales.view(torch.float8_e8m0fnu)
        self.bias = None if bias is None else permuted_bias(F.pad(bias, (0, more)))
        self.type_id = UINT4_LESS_8 if int4 else E2M1
        cuda = weight.device.type == "cuda"
        sms = torch.cuda.get_device_properties(weight.device).multi_processor_count if cuda else 1
        self.workspace = torch.zeros(4 * sms, dtype=torch.int32, device=weight.device)

    def __call__(
        self, a: Tensor, order: tuple[Tensor, Tensor, Tensor], block: int, weights: Tensor, top_k: int, weighted: bool
    ) -> Tensor:
        """[rows of a · top_k, padded N]: row i · top_k + j is a[i]'s for its j-th expert, by `order` (see `aligned`),
        times that weight if `weighted`."""
        out = torch.empty(a.shape[0] * top_k, self.padded_n, dtype=a.dtype, device=a.device)
        operands, sizes = (a, out, self.words, self.bias, self.scales), (a.shape[0], self.padded_n, self.k)
        how = (weights, block, top_k, weighted, self.type_id)
        torch.ops._moe_C.moe_wna16_marlin_gemm(
            *operands, *(None,) * 5, self.workspace, *order, *how, *sizes, True, False, True, False, *(-1,) * 3
        )
        return out


def aligned(sizes: Sequence[int], block: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows that lie group by group: their numbers, those of each group filled up to a multiple of `block` with the
    number of all rows; the group of each block; how many numbers there are. int32."""
    rows = sum(sizes)
    blocks = [-(-size // block) for size in sizes]
    numbers = torch.full((sum(blocks) * block,), rows, dtype=torch.int32)
    room = start = 0
    for size, count in zip(sizes, blocks, strict=True):
        numbers[room : room + size] = torch.arange(start, start + size, dtype=torch.int32)
        room, start = room + count * block, start + size
    groups = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(blocks))
    return numbers.to(device), groups.to(device), torch.tensor([len(numbers)], dtype=torch.int32, device=device)


def usual_block(rows: int, groups: int) -> int:
    """Rows of a block that vLLM takes."""
    return next((block for block in BLOCKS if rows / groups / block < _ROWS_OF_BLOCK), BLOCKS[-1])


def bind(w: Workload, a: Tensor, weight: Weight) -> Call:
    """a [M, K], its rows group by group."""
    load(FILES)
    prepared, sizes = Prepared(weight), products.sizes(w)
    ones = torch.ones(a.shape[0], dtype=torch.float32, device=a.device)

    def of_block(block: int) -> Call:
        order = aligned(sizes, block, a.device)
        return lambda: (prepared(a, order, block, ones, 1, False)[:, : prepared.n],)

    return fastest(("marlin", w), BLOCKS, usual_block(a.shape[0], len(sizes)), of_block)


def _gpt_oss(pre: Tensor) -> Tensor:
    return activate(*split(pre.float(), True), "gpt_oss").to(pre.dtype)


def layer(w: Workload, x: Tensor, router: Tensor, gate_up: Prepared, down: Prepared) -> Call:
    """gpt-oss's layer: vLLM's own kernels for top-k, alignment and the sum over experts around the two products, and
    its activation compiled."""
    load(FILES)
    ops, top_k, (tokens, hidden) = torch.ops._moe_C, w["top_k"], x.shape
    experts, slots = router.shape[0], tokens * top_k
    activation = compiled_for(w, _gpt_oss)

    def integers(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=x.device)

    def of_block(block: int) -> Call:
        room = min(slots + experts * (block - 1), slots * block)

        def call() -> tuple[Tensor, ...]:
            weights, ids = torch.empty(tokens, top_k, device=x.device), integers(tokens, top_k)
            ops.topk_softmax(weights, ids, integers(tokens, top_k), F.linear(x, router).float(), True, None)
            order = integers(room), integers(-(-room // block)), integers(1)
            ops.moe_align_block_size(ids, experts, block, *order, None)
            pre = gate_up(x, order, block, weights, top_k, False)
            act = activation(pre)
            y = down(act, order, block, weights, 1, True)
            out = torch.empty(tokens, down.padded_n, dtype=x.dtype, device=x.device)
            ops.moe_sum(y.view(tokens, top_k, -1), out)
            return (out[:, :hidden],)

        return call

    return fastest(("marlin", w), BLOCKS, usual_block(slots, experts), of_block)
