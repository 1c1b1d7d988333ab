"""The FP8 quantisers in the lab: bfloat16 (or other) activations and weights -> e4m3 values and float32 scales.

dims: what ("activations", "swiglu", "swiglu_interleaved", "rms_norm", "weights"), groups, rows, cols, transposed (the
copy for the weight gradient too, of `groups` equal groups of rows). Activations are [rows, cols] (a pre-activation
[rows, 2 cols]), weights [groups, rows, cols].
"""

from functools import partial

import torch
from torch import Tensor

from expertile.formats.fp8 import Fp8Blocks
from expertile.lab.operators._binds import compiled_call
from expertile.lab.operators._rows import random
from expertile.lab.race.operator import Call, Operator, Rival, Workload
from expertile.ops.quantize.api import quantize_activations, quantize_rms_norm, quantize_swiglu, quantize_weights
from expertile.ragged import offs_from_sizes
from expertile.roofline import Work

_EPS = 1e-6
_SWIGLU = ("swiglu", "swiglu_interleaved")
# Rows × columns: what the models of ANCHORS' larger products quantise (DeepSeek-V3: 7168 and 2048, Mixtral: 4096 and
# 14336, Qwen3: 2048 and 768), down to decode.
_ROWS = ((16384, 7168), (32768, 4096), (16384, 2048), (4096, 14336), (8192, 768), (256, 7168))
_WEIGHTS = ((8, 4096, 7168), (8, 14336, 4096), (32, 7168, 2048), (128, 1536, 2048))


def _inputs(w: Workload, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    make, rows, cols = random(w, device, seed), w["rows"], w["cols"]
    if w["what"] == "weights":
        return (make(w["groups"], rows, cols),)
    inputs: tuple[Tensor, ...] = (make(rows, 2 * cols if w["what"] in _SWIGLU else cols),)
    if w["what"] == "rms_norm":
        inputs = (*inputs, make(cols))
    return (*inputs, _offs(w, device)) if w["transposed"] else inputs


def _offs(w: Workload, device: torch.device) -> Tensor:
    groups = w["groups"]
    return offs_from_sizes([w["rows"] // groups + (g < w["rows"] % groups) for g in range(groups)]).to(device)


def _computed(what: str, x: Tensor, weight: Tensor | None) -> Tensor:
    """What is quantised, in float32, as one writes it in torch."""
    x = x.float()
    if what == "rms_norm":
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS)
        return x if weight is None else x * weight.float()
    if what == "swiglu":
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up
    if what == "swiglu_interleaved":
        return torch.nn.functional.silu(x[..., ::2]) * x[..., 1::2]
    return x


def _by_hand(what: str, x: Tensor, weight: Tensor | None, offs: Tensor | None) -> tuple[Tensor, ...]:
    """In plain torch; the reference, a rival, and what torch.compile is given."""
    if what == "weights":
        made = Fp8Blocks.quantize(x, (128, 128))
        return made.values, made.scales
    wide = _computed(what, x, weight)
    made = Fp8Blocks.quantize(wide)
    if offs is None:
        return made.values, made.scales
    turned, _ = Fp8Blocks.quantize_tokens(wide, offs)
    return made.values, made.scales, turned.values, turned.scales


def _parts(w: Workload, inputs: tuple[Tensor, ...]) -> tuple[str, Tensor, Tensor | None, Tensor | None]:
    x, *rest = inputs
    offs = rest.pop() if w["transposed"] else None
    return w["what"], x, rest[0] if rest else None, offs


def _results_nbytes(w: Workload) -> float:
    """Values and scales, of a transposed copy also the ends of its groups."""
    rows, cols, groups = w["rows"], w["cols"], w["groups"]
    if w["what"] == "weights":
        return groups * (rows * cols + 4.0 * -(-rows // 128) * -(-cols // 128))
    nbytes = rows * cols + 4.0 * rows * -(-cols // 128)
    if w["transposed"]:
        nbytes += cols * ((rows + 127 * groups) // 128) * (128 + 4.0) + 4.0 * groups
    return nbytes


def _work(w: Workload) -> Work:
    """Largest magnitude, quotient and rounding of each element; each copy is quantised on its own."""
    elements = w["rows"] * w["cols"] * (w["groups"] if w["what"] == "weights" else 1)
    read = elements * (2 if w["what"] in _SWIGLU else 1) + (w["cols"] if w["what"] == "rms_norm" else 0)
    offs = 4.0 * w["groups"] if w["transposed"] else 0.0
    return Work(3.0 * elements * (1 + w["transposed"]), read * w.itemsize + offs + _results_nbytes(w))


def _ours(w: Workload, inputs: tuple[Tensor, ...]) -> Call:
    what, x, weight, offs = _parts(w, inputs)
    if what == "weights":
        return lambda: _flat(quantize_weights(x))
    if what == "rms_norm":
        return lambda: _flat(quantize_rms_norm(x, weight, eps=_EPS, offs=offs))  # type: ignore[call-overload]
    if what in _SWIGLU:
        interleaved = what != "swiglu"
        return lambda: _flat(quantize_swiglu(x, interleaved=interleaved, offs=offs))  # type: ignore[call-overload]
    return lambda: _flat(quantize_activations(x, offs=offs))  # type: ignore[call-overload]


def _flat(made: Fp8Blocks | tuple[Fp8Blocks, Fp8Blocks, Tensor]) -> tuple[Tensor, ...]:
    if isinstance(made, Fp8Blocks):
        return made.values, made.scales
    return made[0].values, made[0].scales, made[1].values, made[1].scales


def _allocated(w: Workload) -> float:
    """The results; a norm with a transposed copy also keeps its rstd."""
    return _results_nbytes(w) + (4.0 * w["rows"] if w["what"] == "rms_norm" and w["transposed"] else 0.0)


def _workload(what: str, groups: int, rows: int, cols: int, transposed: bool = False, dtype: str = "bf16") -> Workload:
    dims = (("what", what), ("groups", groups), ("rows", rows), ("cols", cols), ("transposed", transposed))
    shape = f"{groups}x{rows}x{cols}" if what == "weights" else f"{rows}x{cols}"
    name = f"{what}-{shape}{'-transposed' if transposed else ''}-{dtype}"
    return Workload(name, "quantize", "quantize_fp8", dims, dtype)


def _preset() -> tuple[Workload, ...]:
    found = [_workload("activations", 1, r, c) for r, c in _ROWS]
    found += [_workload("activations", 1, 16384, 7168, dtype="fp32")]
    found += [_workload(what, 1, r, c) for what in _SWIGLU for r, c in ((16384, 2048), (32768, 1024), (4096, 14336))]
    found += [_workload("rms_norm", 1, r, c) for r, c in ((16384, 7168), (32768, 4096), (16384, 2048))]
    found += [_workload("weights", *shape) for shape in _WEIGHTS]
    found += [_workload("weights", 8, 4096, 7168, dtype="fp32")]
    turned = (("activations", 8, 16384, 7168), ("activations", 128, 32768, 4096), ("swiglu", 8, 16384, 2048))
    found += [_workload(*shape, transposed=True) for shape in turned]
    found += [_workload("activations", 1, 256, 512), _workload("weights", 2, 256, 384)]  # a CPU can, too
    return tuple(found)


OPERATORS = (
    Operator(
        "quantize_fp8",
        _inputs,
        lambda w, inputs: tuple(x.float() for x in _by_hand(*_parts(w, inputs))),
        _work,
        (
            Rival("expertile", _ours, peer=False, peak_nbytes=_allocated),
            Rival("torch", lambda w, inputs: partial(_by_hand, *_parts(w, inputs))),
            Rival("torch.compile", lambda w, inputs: compiled_call(w, _by_hand, *_parts(w, inputs))),
        ),
        # An e4m3 step (2^-3 of a value, 32 of 448) of few elements: where float32 roundings differ, ties differ too.
        lambda w: (5e-3, 2.0**-3),
    ),
)
PRESETS = {"quantize": _preset}
