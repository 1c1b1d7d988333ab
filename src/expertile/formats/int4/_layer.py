"""What the readers of checkpoints share: checks of one layer's tensors, and the way into and out of an `Int4Weight`."""

from collections.abc import Mapping

import torch

from expertile.formats.int4.weight import SCALE_DTYPES, Int4Weight


def field(
    tensors: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype | None = None, dims: int = 2
) -> torch.Tensor:
    """The tensor called `name`. ValueError unless it is there, with that dtype and number of dimensions."""
    if name not in tensors:
        raise ValueError(f"{name}: expected a tensor of that name, got only {', '.join(sorted(tensors)) or 'none'}")
    x = tensors[name]
    if dtype is not None and x.dtype is not dtype:
        raise ValueError(f"{name}: expected dtype {dtype}, got {x.dtype}")
    if x.dim() != dims:
        raise ValueError(f"{name}: expected {dims} dimensions, got shape {list(x.shape)}")
    return x


def expect_shape(name: str, x: torch.Tensor, shape: tuple[int, ...], what: str) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)} ({what}), got {list(x.shape)}")


def refuse_act_order(name: str, g_idx: torch.Tensor | None, k: int, group_size: int) -> None:
    """ValueError unless value k of a row belongs to group k // group_size. A -1 says that no order was set."""
    if g_idx is None or g_idx.numel() == 0 or bool((g_idx < 0).any()):
        return
    expect_shape(name, g_idx, (k,), "one group for each value of K")
    plain = torch.arange(k, device=g_idx.device) // group_size
    if not torch.equal(g_idx.to(plain.dtype), plain):
        raise ValueError(
            f"{name}: expected groups in order along K, got an activation order (desc_act=True): values that share a "
            "scale do not lie together; quantise with desc_act=False, or with static groups"
        )


def as_weight(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int, dtype: torch.dtype | None
) -> Int4Weight:
    """One expert: values [N, K] 0 … 15, scales and zeros [K/group, N]; `dtype` of the scales, or None: as stored."""
    if dtype is None and scales.dtype not in SCALE_DTYPES:
        raise ValueError(f"dtype: expected bfloat16 or float16 for scales stored as {scales.dtype}, got None")
    scales = scales.to(dtype or scales.dtype)
    kept = None if zeros is None else zeros.to(scales.dtype)[None]
    return Int4Weight.of_values(values[None], scales[None], kept, group_size)


def expert_of(weight: Int4Weight, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values uint8 [N, K], scales [K/group, N], zeros int32 [K/group, N]) of one expert; ValueError where its zero
    points are not whole, and so have no place in a checkpoint."""
    one = weight.part(expert, expert + 1).with_zeros()
    assert one.zeros is not None
    zeros = one.zeros[0].to(torch.int32)
    if not torch.equal(zeros.to(one.zeros.dtype), one.zeros[0]):
        raise ValueError("zeros: expected whole numbers, which a checkpoint can hold, got others")
    return one.values()[0], one.scales[0], zeros


def check_zeros(zeros: torch.Tensor, low: int, high: int, kind: str) -> None:
    """ValueError unless low <= zeros <= high, the range that the format `kind` can say."""
    found = (int(zeros.min()), int(zeros.max())) if zeros.numel() else (low, high)
    if found[0] < low or found[1] > high:
        raise ValueError(f"zeros: expected {low} … {high} for {kind}, got {found[0]} … {found[1]}")
