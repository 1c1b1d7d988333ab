"""Layers in the formats of checkpoints, built nibble by nibble by the published rules; no code of the package takes
part, and everything is slow and plain."""

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def random_layer(n: int, k: int, group: int, seed: int = 0, low: int = 0, high: int = 15, dtype=torch.float16):
    """(q [N, K] 0 … 15, scale [N, K/group], zero [N, K/group] in low … high)."""
    gen = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (n, k), generator=gen)
    scale = (torch.rand(n, k // group, generator=gen) + 0.5).to(dtype)
    return q, scale, torch.randint(low, high + 1, (n, k // group), generator=gen)


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def words(values: torch.Tensor, order=range(8)) -> torch.Tensor:
    """Eight along the last dimension in an int32, value order[i] in bits 4i … 4i + 3; padded with zeros."""
    out = []
    for row in values.tolist():
        row = row + [0] * (-len(row) % 8)
        out.append([signed(sum(row[j + o] << (4 * i) for i, o in enumerate(order))) for j in range(0, len(row), 8)])
    return torch.tensor(out, dtype=torch.int32)


def gptq(q, scale, zero, version: int = 1) -> dict[str, torch.Tensor]:
    k = q.shape[1]
    return {
        "qweight": words(q).t().contiguous(),
        "qzeros": words((zero - (1 if version == 1 else 0)).t()),
        "scales": scale.t().contiguous(),
        "g_idx": torch.tensor([i // (k // scale.shape[1]) for i in range(k)], dtype=torch.int32),
    }


def awq(q, scale, zero) -> dict[str, torch.Tensor]:
    return {"qweight": words(q.t(), AWQ_ORDER), "qzeros": words(zero.t(), AWQ_ORDER), "scales": scale.t().contiguous()}


def compressed(q, scale, zero=None) -> dict[str, torch.Tensor]:
    tensors = {"weight_packed": words(q), "weight_scale": scale, "weight_shape": torch.tensor(q.shape)}
    if zero is not None:
        tensors["weight_zero_point"] = words(zero.t()).t().contiguous()
    return tensors


def dense(q, scale, zero) -> torch.Tensor:
    """float32 [N, K]: (q − zero) · scale."""
    group = q.shape[1] // scale.shape[1]
    spread = lambda x: x.float().repeat_interleave(group, 1)  # noqa: E731
    return (q - spread(zero)) * spread(scale)


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype and torch.equal(got[name], x), name
