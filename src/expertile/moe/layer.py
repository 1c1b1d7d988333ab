"""MoE: router and expert MLPs as a module.

    logits = x @ router^T (+ router_bias);  ids, weights = route(logits);  out = moe_mlp(x, gate_up, down, ids, weights)

plus, with a shared expert, one more MLP that every token goes through (DeepSeek-V3, arXiv:2412.19437, eq. 12).
Parameters are stored as `torch.nn.Linear` has them, one expert after the other: router [E, H], gate_up [E, 2I, H], down
[E, H, I].
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from expertile.formats.fp8 import QuantizedBuffers
from expertile.formats.weight_only import quantize
from expertile.moe.expert_weights import Experts, autocasts
from expertile.moe.experts import experts_mlp, moe_mlp
from expertile.moe.logits import invariant_logits_in, router_logits_and_x
from expertile.moe.lora import Adapter, Lora
from expertile.moe.router import RouterConfig, Routing, require_independent, route
from expertile.ops.checks import came, check_flags, check_integer, check_number
from expertile.ops.gathered_mm.problem import ACTIVATIONS
from expertile.ops.launch.device import FORMULA_DTYPES


class MoE(nn.Module):
    """A Mixture-of-Experts feed-forward layer.

    Args:
        hidden_size, intermediate_size: H and I.
        num_experts, top_k: E and k.
        activation, interleaved: as for `moe_mlp`.
        bias: whether the experts have biases, gate_up_bias [E, 2I] and down_bias [E, H].
        router_bias: whether the router has one, [E].
        router_dtype: the dtype that logits are computed in, under autocast too; x and the router are cast to it. None:
            that of both, which must be one (or autocast's).
        shared_intermediate_size: I of a shared expert with the same activation, or None.
        batch_invariant: a token's result, routing included, has the same bits in every batch, in training and without
            gradients; see `moe_mlp`, which also says what of the gradients. router_dtype float32 with 16-bit x and
            router then means their product summed in float32, whose gradient is rounded to their dtype.
        device, dtype: of the parameters. On the meta device they are filled by `to_empty` and `reset_parameters`.
        router_options: fields of `RouterConfig`: score, order, normalize, scale, num_groups, top_groups, group_score,
            capacity_factor, rounding, tile, candidates.

    Attributes:
        config: RouterConfig.
        correction_bias: [E] buffer, added to the scores for the choice alone; for sigmoid scores, else None. It stays
            float32 when the layer is cast, as bfloat16 would lose the steps by which `update_correction_bias` moves it.

    Raises:
        ValueError: a size below 1, an unknown activation, a dtype that is none of floating point, a `RouterConfig` that
            cannot be, or batch_invariant with one that drops slots by other tokens (capacity_factor, rounding).
        TypeError: a router option that RouterConfig has no field for.
    """

    correction_bias: torch.Tensor | None
    gate_up: Any  # a parameter, or QuantizedBuffers
    down: Any

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        interleaved: bool = False,
        bias: bool = False,
        router_bias: bool = False,
        router_dtype: torch.dtype | None = None,
        shared_intermediate_size: int | None = None,
        batch_invariant: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **router_options: Any,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
        if shared_intermediate_size is not None:
            sizes["shared_intermediate_size"] = shared_intermediate_size
        for name, size in sizes.items():
            check_integer(name, size, 1)
        check_flags(interleaved=interleaved, bias=bias, router_bias=router_bias, batch_invariant=batch_invariant)
        _check_dtypes(router_dtype=router_dtype, dtype=dtype)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {ACTIVATIONS}, got {activation!r}")
        self.config = RouterConfig(num_experts, top_k, **router_options)
        if batch_invariant:
            require_independent(self.config)
        self.batch_invariant = batch_invariant
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.shared_intermediate_size = shared_intermediate_size
        self.activation, self.interleaved, self.router_dtype = activation, interleaved, router_dtype

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        e, h, i, shared = num_experts, hidden_size, intermediate_size, shared_intermediate_size
        self.router = parameter(e, h)
        self.router_bias = parameter(e) if router_bias else None
        self.gate_up = parameter(e, 2 * i, h)
        self.gate_up_bias = parameter(e, 2 * i) if bias else None
        self.down = parameter(e, h, i)
        self.down_bias = parameter(e, h) if bias else None
        self.shared_gate_up = None if shared is None else parameter(2 * shared, h)
        self.shared_down = None if shared is None else parameter(h, shared)
        correction = torch.zeros(e, dtype=torch.float32, device=device) if self.config.score == "sigmoid" else None
        self.register_buffer("correction_bias", correction)
        self.lora_scale: float | None = None
        self.reset_parameters()

    def _fan_in(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Each parameter with the number of inputs that it is drawn for."""
        pairs = (
            (self.router, self.router_bias),
            (self.gate_up, self.gate_up_bias),
            (self.down, self.down_bias),
            (self.shared_gate_up, None),
            (self.shared_down, None),
        )
        for weight, bias in pairs:
            for parameter in (weight, bias):
                if isinstance(weight, torch.Tensor) and parameter is not None:
                    yield parameter, weight.shape[-1]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every weight and bias as `torch.nn.Linear` does, from U(-1, 1) / sqrt(inputs); no correction, and
        adapters that add nothing.

        Quantised experts, and their biases, stay as they are.
        """
        for parameter, inputs in self._fan_in():
            bound = 1.0 / math.sqrt(inputs)
            nn.init.uniform_(parameter, -bound, bound)
        if self.correction_bias is not None:
            self.correction_bias.zero_()
        self._reset_lora()

    def _reset_lora(self) -> None:
        """Draw the adapters' factor of the inputs as `torch.nn.Linear` does, and make the other zeros."""
        for name in ("gate_up", "down"):
            if (a := getattr(self, f"{name}_lora_a", None)) is not None:
                nn.init.uniform_(a, -(a.shape[1] ** -0.5), a.shape[1] ** -0.5)
                getattr(self, f"{name}_lora_b").zero_()

    @torch.no_grad()
    def quantize_experts(self, format: str) -> "MoE":
        """Round the routed experts' weights to "mxfp4", "mxfp4_fp8", "int4" or "fp8", in place, and return the layer.

        `gate_up` and `down` become `QuantizedBuffers`: data without gradients, with state_dict keys of their own
        (`gate_up.packed`, …). All else stays as it is and trainable. See `formats.weight_only.quantize`. x is then
        bfloat16 or float16, also by autocast: a router in float32 takes such x with a `router_dtype`. Scales of "int4"
        have its dtype. Products of "fp8" and "mxfp4_fp8" take float32 too, and round it, and the activation, to FP8.
        ValueError for another format, sizes that it does not take, or experts that are quantised already.
        """
        if not isinstance(self.gate_up, torch.Tensor):
            raise ValueError("gate_up, down: expected weights that are not quantised, got quantised ones")
        made = {name: QuantizedBuffers(quantize(getattr(self, name), format)) for name in ("gate_up", "down")}
        for name, buffers in made.items():
            delattr(self, name)
            setattr(self, name, buffers)
        return self

    @torch.no_grad()
    def add_lora(
        self,
        rank: int,
        *,
        alpha: float | None = None,
        targets: Sequence[str] = ("gate_up", "down"),
        dtype: torch.dtype | None = None,
    ) -> "MoE":
        """Freeze the routed experts, quantised or not, put adapters of low rank beside them, and return the layer.

        New parameters, laid out as PEFT does (`expertile.moe.lora.Adapter`), for each of `targets`:
        `gate_up_lora_a` [E · rank, H], drawn as by `torch.nn.Linear`, and `gate_up_lora_b` [2I, rank · E], zeros; so
        the layer computes what it did. `alpha`: the delta is scaled by alpha / rank, which a state_dict does not hold;
        rank by default. `dtype`: of the adapters; the router's by default. Router and shared expert stay as they are.

        Raises:
            ValueError: a rank below 1, targets other than gate_up and down, or a layer with adapters already or with
                batch_invariant.
        """
        check_integer("rank", rank, 1)
        check_number("alpha", rank if alpha is None else alpha)
        _check_dtypes(dtype=dtype)
        listed = isinstance(targets, list | tuple | set | frozenset)
        if not targets or not listed or not set(targets) <= {"gate_up", "down"}:
            raise ValueError(f"targets: expected gate_up, down or both, got {targets!r}")
        if self.lora_scale is not None or self.batch_invariant:
            raise ValueError("add_lora: expected a layer without adapters and without batch_invariant, got another")
        e, h, i = self.config.num_experts, self.hidden_size, self.intermediate_size
        options: Any = {"device": self.router.device, "dtype": dtype or self.router.dtype}
        for frozen in (self.gate_up, self.down, self.gate_up_bias, self.down_bias):
            if frozen is not None:
                frozen.requires_grad_(False)
        for name, (out, columns) in {"gate_up": (2 * i, h), "down": (h, i)}.items():
            if name in targets:
                setattr(self, f"{name}_lora_a", nn.Parameter(torch.empty(e * rank, columns, **options)))
                setattr(self, f"{name}_lora_b", nn.Parameter(torch.empty(out, e * rank, **options)))
        self._reset_lora()
        self.lora_scale = (rank if alpha is None else alpha) / rank
        return self

    @property
    def lora(self) -> Lora | None:
        """The adapters, or None without."""
        if self.lora_scale is None:
            return None
        found: dict[str, Adapter] = {}
        for name in ("gate_up", "down"):
            if hasattr(self, f"{name}_lora_a"):
                a, b = (getattr(self, f"{name}_lora_{part}") for part in "ab")
                found[name] = Adapter(a, b, self.lora_scale)
        return Lora(**found)

    @torch.no_grad()
    def update_correction_bias(self, counts: torch.Tensor, rate: float = 1e-3) -> None:
        """Move the bias of experts with fewer rows than the mean up by `rate`, of those with more down: DeepSeek-V3's
        balancing without a loss (arXiv:2408.15664, algorithm 1). `counts` [E]: rows of each expert over a step, on all
        ranks. ValueError for a layer without correction bias, and counts of another shape or device."""
        if self.correction_bias is None:
            raise ValueError("correction_bias: expected a layer with sigmoid scores, got softmax")
        if self.correction_bias.dtype is not torch.float32:  # assigned from a checkpoint that was cast
            self.correction_bias = self.correction_bias.float()
        bias = self.correction_bias
        if not isinstance(counts, torch.Tensor) or counts.shape != bias.shape or counts.device != bias.device:
            raise ValueError(f"counts: expected {list(bias.shape)} on {bias.device}, got {came(counts)}")
        check_number("rate", rate)
        counts = counts.to(torch.float32)
        self.correction_bias.add_(torch.sign(counts.mean() - counts), alpha=rate)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """What `to`, `bfloat16` and others do to every tensor; the correction bias moves, and stays float32."""
        before = self.correction_bias
        super()._apply(fn, recurse)
        after = self.correction_bias
        if before is not None and after is not None and after.dtype is not before.dtype:
            self.correction_bias = before.to(after.device, torch.float32)
        return self

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The router's logits [..., E] for x [..., H].

        ValueError if x has another shape, or x and the router are of two dtypes, and neither router_dtype nor autocast
        casts them.
        """
        self._check_shape(x)
        return self._logits_and_x(x.reshape(-1, self.hidden_size))[0].view(*x.shape[:-1], self.config.num_experts)

    def _check_shape(self, x: object) -> None:
        if not isinstance(x, torch.Tensor) or x.dim() < 1 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x: expected shape [..., {self.hidden_size}], got {came(x)}")

    def _logits_and_x(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`logits`, and x for the experts (`router_logits_and_x`)."""
        dtype = self.router_dtype
        if dtype is None:
            if x.dtype is not self.router.dtype and not autocasts(x):
                raise ValueError(
                    f"router: expected {x.dtype}, x's dtype, or a router_dtype to cast both to, got {self.router.dtype}"
                )
            return router_logits_and_x(
                *(x, self.router, self.router_bias), batch_invariant=self.batch_invariant, overwrite_gradient=True
            )
        bias = None if self.router_bias is None else self.router_bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext():
            if self.batch_invariant:
                return invariant_logits_in(dtype, x, self.router, bias), x
            return F.linear(x.to(dtype), self.router.to(dtype), bias), x

    @property
    def _form(self) -> dict[str, Any]:
        """What `moe_mlp` takes beside tensors."""
        names = ("activation", "interleaved", "batch_invariant")
        return {name: getattr(self, name) for name in names}

    def forward(self, x: torch.Tensor, *, return_routing: bool = False) -> Any:
        """x [..., H] of the experts' dtype (any under autocast) -> [..., H]; with `return_routing` also the Routing,
        scores included, for the auxiliary losses.

        ValueError if x's last dimension isn't H, or its dtype another; see `logits` for the router's.
        """
        self._check_shape(x)
        if isinstance(self.gate_up, torch.Tensor) and x.dtype is not self.gate_up.dtype and not autocasts(x):
            raise ValueError(f"x: expected {self.gate_up.dtype}, the dtype of gate_up, got {x.dtype}")
        logits, tokens = self._logits_and_x(x.reshape(-1, self.hidden_size))
        routing: Routing = route(
            logits,
            self.config,
            bias=self.correction_bias,
            want_scores=return_routing,
            batch_invariant=self.batch_invariant,
        )
        out = self._experts(tokens, routing)
        if self.shared_gate_up is not None and self.shared_down is not None:
            ids = torch.zeros((tokens.shape[0], 1), dtype=torch.int32, device=x.device)
            shared = (self.shared_gate_up[None], self.shared_down[None])
            out = out + moe_mlp(tokens, *shared, ids, torch.ones_like(ids).float(), **self._form)
        out = out if x.dim() == 2 else out.view(x.shape)
        return (out, routing) if return_routing else out

    def _experts(self, tokens: torch.Tensor, routing: Routing) -> torch.Tensor:
        """What the routed experts make of tokens [T, H]."""
        weights = (_weight(self.gate_up), _weight(self.down), self.gate_up_bias, self.down_bias)
        experts = Experts(*weights, **self._form)
        return experts_mlp(experts, tokens, routing.topk_ids, routing.topk_weights, lora=self.lora)

    def extra_repr(self) -> str:
        c = self.config
        text = (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"num_experts={c.num_experts}, top_k={c.top_k}, activation={self.activation}, score={c.score}"
        )
        if self.shared_intermediate_size is not None:
            text += f", shared_intermediate_size={self.shared_intermediate_size}"
        if c.num_groups is not None:
            text += f", groups={c.top_groups} of {c.num_groups}"
        if c.capacity_factor is not None:
            text += f", capacity_factor={c.capacity_factor}"
        return (
            text
            + (f", rounding={c.rounding}" if c.rounding is not None else "")
            + (", batch_invariant=True" if self.batch_invariant else "")
            + (", lora" if self.lora_scale is not None else "")
        )


def _check_dtypes(**dtypes: object) -> None:
    for name, given in dtypes.items():
        if given is not None and given not in FORMULA_DTYPES:
            raise ValueError(f"{name}: expected None or one of {FORMULA_DTYPES}, got {given!r}")


def _weight(held: Any) -> Any:
    return held.weight if isinstance(held, QuantizedBuffers) else held
