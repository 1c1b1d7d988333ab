"""FLOPs and bytes of the operation a report names, under every reasonable reading of its shapes.

FLOPs count a multiply-add as two. Bytes are the least any implementation must move: each input once, each output
once. Sources: matrix product 2MNK; attention 4·B·H·S²·D (Dao, "FlashAttention-2", 2023, section 4.1), half of it
when causal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from expertile.lab.audit.dims import Shape


@dataclass(frozen=True)
class Reading:
    """One reading of what was computed. `flops` is None for operations that memory alone limits."""

    flops: float | None
    nbytes: float
    how: str
    standard: bool = True  # the reading a specialist would try first


Dims = Mapping[str, int]


def readings(operation: str, dims: Dims, shapes: Sequence[Shape], itemsize: float) -> tuple[Reading, ...] | str:
    """Every reading of `operation` on these dimensions, or the reason there is none ("K is not stated")."""
    make = _BY_OPERATION.get(operation)
    if make is None:
        return f"FLOPs and bytes of {operation.replace('_', ' ')} are not modelled"
    return make(dims, shapes, itemsize)


def _product(m: int, n: int, k: int, count: int, itemsize: float, note: str = "", standard: bool = True) -> Reading:
    times = f"{count}·" if count > 1 else ""
    return Reading(
        2.0 * count * m * n * k,
        count * itemsize * (m * k + k * n + m * n),
        f"{times}2·{m}·{n}·{k}{note}",
        standard,
    )


def _gemm(dims: Dims, shapes: Sequence[Shape], itemsize: float) -> tuple[Reading, ...] | str:
    batch = dims.get("groups") or dims.get("batch") or 1
    if {"m", "n", "k"} <= dims.keys():
        m, n, k = dims["m"], dims["n"], dims["k"]
        one = _product(m, n, k, 1, itemsize, standard=batch == 1)
        return (one,) if batch == 1 else (_product(m, n, k, batch, itemsize), one)
    if shapes:
        found = _gemm_of_shapes(dims, shapes, itemsize)
        if found:
            return found
    for name in ("mnk", "size"):
        if name in dims:
            s = dims[name]
            return (_product(s, s, s, 1, itemsize, " (square)"),)
    if "n" in dims and not {"m", "k"} & dims.keys():
        s = dims["n"]
        return (_product(s, s, s, 1, itemsize, " (square)"),)
    if {"hidden", "ffn"} <= dims.keys():
        return _moe(dims, shapes, itemsize)
    missing = [name.upper() for name in ("m", "n", "k") if name not in dims]
    return "the sizes of the product are not stated" + (f" ({', '.join(missing)} missing)" if len(missing) < 3 else "")


def _gemm_of_shapes(dims: Dims, shapes: Sequence[Shape], itemsize: float) -> tuple[Reading, ...]:
    first = shapes[0]
    count = first.count
    if count == 1 and dims.get("groups"):
        count = dims["groups"]
    sizes = first.sizes
    if len(sizes) == 3:
        found = [_product(*sizes, count, itemsize)]
        if count > 1 and first.count == 1:
            found.append(_product(*sizes, 1, itemsize, standard=False))
        return tuple(found)
    if len(sizes) == 4:
        b, m, n, k = sizes
        return (_product(m, n, k, b * count, itemsize),)
    if len(sizes) == 2:
        if (
            len(shapes) > 1
            and len(shapes[1].sizes) == 2
            and shapes[1].sizes[0] == sizes[1]
            and shapes[1].sizes != sizes
        ):
            return (_product(sizes[0], shapes[1].sizes[1], sizes[1], count, itemsize),)
        other = dims.get("k") or dims.get("m") or dims.get("tokens") or dims.get("batch")
        if other:
            return (_product(other, *sizes, 1, itemsize), *_square(sizes, count, itemsize, False))
        return _square(sizes, count, itemsize, True)
    return ()


def _square(sizes: Sequence[int], count: int, itemsize: float, standard: bool) -> tuple[Reading, ...]:
    """ "2048×2048" alone is read as 2048³; two different sizes say nothing of the third."""
    if sizes[0] != sizes[1]:
        return ()
    s = sizes[0]
    return (_product(s, s, s, count, itemsize, " (square)", standard),)


def _moe(dims: Dims, shapes: Sequence[Shape], itemsize: float) -> tuple[Reading, ...] | str:
    if {"m", "n", "k"} <= dims.keys() or not {"hidden", "ffn"} <= dims.keys():
        return (
            _gemm(dims, shapes, itemsize)
            if {"m", "n", "k"} <= dims.keys() or shapes or "size" in dims
            else ("hidden and intermediate sizes are not stated")
        )
    h, f, experts = dims["hidden"], dims["ffn"], dims.get("groups", 1)
    topk = dims.get("topk")
    if "tokens" in dims:
        tokens, from_batch = dims["tokens"], False
    elif {"batch", "seq"} <= dims.keys():
        tokens, from_batch = dims["batch"] * dims["seq"], True
    elif "batch" in dims:
        tokens, from_batch = dims["batch"], True
    else:
        return "the number of tokens is not stated"
    # Tokens that came as batch x sequence are counted before routing; a bare token count may be after it.
    expansions = [topk] if topk and from_batch else sorted({1, topk or 1})
    found = []
    for rows_per_token in expansions:
        rows = tokens * rows_per_token
        active = min(experts, rows)
        for products in (1, 2, 3):
            note = f" (top-{rows_per_token}" if rows_per_token > 1 else " (one expert per token"
            note += f", {products} of an expert's products)" if products > 1 else ", one product per expert)"
            found.append(
                Reading(
                    2.0 * rows * h * f * products,
                    itemsize * (active * h * f * products + rows * (h + f)),
                    f"{products}·2·{rows}·{h}·{f}{note}" if products > 1 else f"2·{rows}·{h}·{f}{note}",
                    products == 1,
                )
            )
    return tuple(found)


def _attention(dims: Dims, shapes: Sequence[Shape], itemsize: float) -> tuple[Reading, ...] | str:
    four = next((s.sizes for s in shapes if len(s.sizes) == 4), None)
    d = dict(dims)
    if "heads" not in d and {"hidden", "head_dim"} <= d.keys():
        d["heads"] = max(1, d["hidden"] // d["head_dim"])
    if {"batch", "heads", "seq", "head_dim"} <= d.keys():
        orders = [(d["batch"], d["heads"], d["seq"], d["head_dim"])]
    elif four:
        b, x, y, e = four
        orders = [(b, min(x, y), max(x, y), e), (b, max(x, y), min(x, y), e)]
    else:
        missing = [n.replace("_", " ") for n in ("batch", "heads", "seq", "head_dim") if n not in d]
        return f"the attention shape is not complete ({', '.join(missing)} missing)"
    found = []
    for i, (b, h, s, e) in enumerate(orders):
        full = 4.0 * b * h * s * s * e
        kv = d.get("kv_heads", 1)
        nbytes = itemsize * b * s * e * (2 * h + 2 * min(kv, h))
        found.append(Reading(full, nbytes, f"4·{b}·{h}·{s}²·{e}", i == 0))
        found.append(Reading(full / 2, nbytes, f"4·{b}·{h}·{s}²·{e}/2 (causal)", False))
    return tuple(found)


def rows_and_columns(dims: Dims, shapes: Sequence[Shape]) -> tuple[int, int] | None:
    """(rows, columns) of a row-wise operation; a row length given by the table replaces that of the shape."""
    cols = dims.get("cols") or dims.get("hidden") or dims.get("n")
    rows = dims.get("rows") or dims.get("tokens") or dims.get("m")
    if rows is None and {"batch", "seq"} <= dims.keys():
        rows = dims["batch"] * dims["seq"]
    if shapes:
        sizes = shapes[0].sizes
        return rows or prod(sizes[:-1]), cols or sizes[-1]
    if rows and cols:
        return rows, cols
    return None


def _rowwise(dims: Dims, shapes: Sequence[Shape], itemsize: float) -> tuple[Reading, ...] | str:
    found = rows_and_columns(dims, shapes)
    if found is None:
        return "the number of rows or columns is not stated"
    rows, cols = found
    return (Reading(None, 2.0 * rows * cols * itemsize, f"read and write {rows}×{cols} × {itemsize:g} B"),)


def _streams(count: int, name: str) -> Callable[[Dims, Sequence[Shape], float], tuple[Reading, ...] | str]:
    def make(dims: Dims, shapes: Sequence[Shape], itemsize: float) -> tuple[Reading, ...] | str:
        elements = _elements(dims, shapes)
        if elements is None:
            return "the number of elements is not stated"
        return (Reading(None, count * elements * itemsize, f"{count} × {elements} × {itemsize:g} B ({name})"),)

    return make


def _elements(dims: Dims, shapes: Sequence[Shape]) -> int | None:
    if "elements" in dims:
        return dims["elements"]
    if shapes:
        return shapes[0].elements
    if {"m", "n"} <= dims.keys():
        return dims["m"] * dims["n"]
    if {"rows", "cols"} <= dims.keys():
        return dims["rows"] * dims["cols"]
    return dims.get("size") or dims.get("n")


_BY_OPERATION: dict[str, Callable[[Dims, Sequence[Shape], float], tuple[Reading, ...] | str]] = {
    "gemm": _gemm,
    "grouped_gemm": _moe,
    "moe": _moe,
    "attention": _attention,
    "softmax": _rowwise,
    "layer_norm": _rowwise,
    "rms_norm": _rowwise,
    "vector_add": _streams(3, "two inputs, one output"),
    "copy": _streams(2, "one input, one output"),
    "elementwise": _streams(2, "one input, one output"),
    "reduction": _streams(1, "one input"),
}
