"""Whole models of transformers, end to end: a training step, and decode and prefill when serving. Random weights.

Everything beside the experts is transformers' own. A decode step reads a static cache of random keys, and a CUDA graph
replays it; a prefill of one sequence writes no cache. The presets hold no workloads of `bench.run`: a model fills the
memory, and its candidates share one set of parameters.

Gate: logits (training: loss and three gradients) against transformers' grouped_mm on the same weights, quantised ones
dequantised. Both get the routing of the first pass; a compiled step keeps its own, within wider limits. Bounds: 6 FLOPs
for each token and active parameter in training, parameters and moments read and written once; 2 in decode, the cache,
the dense weights and the experts that have tokens read.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from expertile.lab.measure.env import Env, timestamp
from expertile.lab.measure.environment import capture_env, new_run_id
from expertile.lab.measure.interleaved import Budget, Failure, failure_of, release, time_interleaved
from expertile.lab.operators import _models as models
from expertile.lab.operators._models import BATCHED_TOKENS, DEQUANTISED, GPT_OSS, QWEN3, Plan
from expertile.lab.race.case import Site
from expertile.lab.race.memory import peak_memory
from expertile.lab.race.operator import Verdict
from expertile.lab.race.record import PEAK_BYTES, TOKENS_PER_S, Record, kept, measured
from expertile.roofline import Work, bound

TRAIN, SERVE = "end-to-end-train", "end-to-end-serve"
COMPILED = "-compiled"
TRAINERS = ("expertile", "grouped_mm", "sonicmoe", f"grouped_mm{COMPILED}", f"expertile{COMPILED}")
IN_BF16, IN_MXFP4 = ("expertile", "grouped_mm", "batched_mm"), "expertile-mxfp4"
SERVERS = (*IN_BF16, IN_MXFP4, "expertile-int4", "expertile-fp8", "triton_kernels")
BACKENDS = {TRAIN: TRAINERS, SERVE: SERVERS}
# Relative error of logits and gradients: what bfloat16 rounds in a layer, added over the layers like a random walk. FP8
# rounds activations to 4 bits too, and a compiled step routes some tokens otherwise.
LIMIT_OF_LAYER, FP8_LIMIT, COMPILED_LIMIT = 0.025, 0.2, 0.3
_FULL = dict(vocab_size=151936, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
_SMALL = dict(hidden_size=64, vocab_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=16)


def plans(preset: str, device: torch.device) -> tuple[Plan, ...]:
    """At full size for a GPU, with two small layers for a CPU."""
    qwen, oss = {**QWEN3.options, **_FULL}, {**GPT_OSS.options}
    layers, name = (12 if preset == TRAIN else 48, 36), ""
    if device.type != "cuda":
        qwen |= _SMALL | dict(moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2)
        oss |= _SMALL | dict(intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)
        layers, name = (2, 2), "small-"
    found = (
        replace(QWEN3, name=f"{name}{QWEN3.name}", options=qwen | {"num_hidden_layers": layers[0]}),
        replace(GPT_OSS, name=f"{name}{GPT_OSS.name}", options=oss | {"num_hidden_layers": layers[1]}, packed=True),
    )
    return found[:1] if preset == TRAIN else found


@dataclass(frozen=True)
class Call:
    """What a model is timed at: `context` tokens lie in the cache of each of `batch` sequences."""

    op: str
    name: str
    tokens: int
    batch: int = 1
    context: int = 0
    policy: str = "eager"


@dataclass(frozen=True)
class Bench:
    """Where and for how long to measure, and which candidates."""

    preset: str
    site: Site
    budget: Budget
    backends: Sequence[str]
    env: Env
    run: str

    def judge(self, plan: Plan, name: str, run: Callable[[], tuple[Tensor, ...]], truth: Any) -> Verdict | Failure:
        least = FP8_LIMIT if name.endswith("fp8") else COMPILED_LIMIT if name.endswith(COMPILED) else 0.0
        limit = max(least, LIMIT_OF_LAYER * math.sqrt(plan.options["num_hidden_layers"]))
        return self.tried(lambda: models.within(run(), truth, limit))

    def tried(self, fn: Callable[[], Verdict]) -> Verdict | Failure:
        try:
            return fn()
        except ImportError as error:
            return Failure("missing", f"{type(error).__name__}: {error}"[:300])
        except Exception as error:
            return failure_of(error, self.site.torch_device)
        finally:
            release(self.site.torch_device)

    def records(
        self,
        plan: Plan,
        call: Call,
        run: Callable[[str], Any],
        verdicts: Mapping[str, Verdict | Failure],
        work: Work,
        held: float,
        details: Callable[[str], Mapping[str, Any]] = lambda name: {},
    ) -> Iterator[Record]:
        """tokens/s of every candidate, timed in turns where it is right; then its peak memory, `held` included."""
        import transformers

        device = self.site.torch_device
        right = [n for n, v in verdicts.items() if isinstance(v, Verdict) and v.ok]
        more = {n: details(n) if n in right else {} for n in verdicts}
        timed = {n: lambda _, n=n: run(n) for n in right}
        outcomes = time_interleaved(timed, policy=call.policy, device=device, budget=self.budget)
        release(device)
        sizes = {"model": plan.name, "layers": plan.options["num_hidden_layers"]}
        for name, verdict in verdicts.items():
            fields: dict[str, Any] = dict(
                op=call.op,
                workload=f"{self.preset}/{plan.name}-{call.name}",
                shape=sizes | {"batch": call.batch, "tokens": call.tokens, "context": call.context},
                dtype="bf16",
                backend=name,
                policy=call.policy,
                run=self.run,
                details={"transformers": transformers.__version__, "held_nbytes": held, **more[name]},
            )
            one = measured(
                work=work,
                limit=bound(work, self.site.device, "fp8" if name.endswith("fp8") else "bf16"),
                outcome=outcomes.get(name),
                verdict=verdict,
                env=self.env,
                **fields,
            )
            low, high = one.ci95 or (0.0, 0.0)
            ci95 = (call.tokens / high, call.tokens / low) if low else None
            value, most = one.value and call.tokens / one.value, one.bound and call.tokens / one.bound
            yield replace(one, metric=TOKENS_PER_S, value=value, ci95=ci95, bound=most)
            if one.status == "ok":
                with torch.no_grad():
                    peak = held + peak_memory(lambda name=name: run(name), device)  # type: ignore[misc]
                yield Record(metric=PEAK_BYTES, value=peak, env=one.env, date=timestamp(), **fields)
                release(device)


def measure(
    preset: str,
    site: Site,
    *,
    out_path: str | Path | None = None,
    seconds: float = 12.0,
    backends: Sequence[str] = (),
    only: Sequence[str] = ("*",),
    batches: Sequence[int] = (1, 8, 64),
) -> Iterator[Record]:
    """The records of a preset, each in `out_path` as soon as it is made; models one after another. `seconds`: of timing
    for each workload; `backends`: some of BACKENDS; `only`: patterns of models' names. A CPU takes small models, and
    few tokens. ValueError without transformers 5.7."""
    try:
        models.register()
    except ImportError as error:
        raise ValueError(f"{preset}: {error}") from None
    on_gpu = site.torch_device.type == "cuda"
    few = tuple(n for n in BACKENDS[preset] if on_gpu or COMPILED not in n)
    chosen = tuple(n for n in few if not backends or n in backends)
    budget = Budget(seconds) if on_gpu else Budget(0.1, 3, 3)
    bench = Bench(preset, site, budget, chosen, capture_env(site.device), new_run_id())
    for plan in plans(preset, site.torch_device):
        if any(fnmatch(plan.name, pattern) for pattern in only):
            tokens = 8192 if on_gpu else 32
            made = train(bench, plan, tokens) if preset == TRAIN else serve(bench, plan, batches, tokens)
            yield from kept(made, out_path)
            release(site.torch_device)


def line(record: Record) -> str:
    """A record in a few words."""
    name = f"{record.workload.partition('/')[2]}  {record.backend}: "
    if record.value is None or record.status != "ok":
        return f"{name}{record.status}, {record.reason}"
    if record.metric == PEAK_BYTES:
        return f"{name}{record.value / 1e9:.3g} GB at the peak"
    share = record.details.get("experts_share")
    inside = "" if share is None else f", {share:.0%} of the step in the experts"
    of_bound = f", {record.value / record.bound:.0%} of the bound" if record.bound else ""
    return f"{name}{record.value:.5g} tokens/s{of_bound}{inside}, error {record.rel_error or 0:.1e}"


def _flops(model: Any, tokens: int, logits: int, keys: float) -> float:
    """Of a forward pass in which a token meets so many keys, and `logits` tokens the head."""
    c, inside = model.config, {id(p) for _, m in models.named_experts(model) for p in m.parameters()}
    dense = sum(p.numel() for n, p in model.named_parameters() if id(p) not in inside and "embed_tokens" not in n)
    intermediate = getattr(c, "moe_intermediate_size", None) or c.intermediate_size
    experts = 3 * c.num_experts_per_tok * c.hidden_size * intermediate * c.num_hidden_layers
    head = model.lm_head.weight.numel()
    of_token = 2.0 * (dense - head + experts) + 4.0 * keys * c.num_attention_heads * c.head_dim * c.num_hidden_layers
    return tokens * of_token + 2.0 * logits * head


def train(bench: Bench, plan: Plan, tokens: int) -> Iterator[Record]:
    """A step of `tokens` tokens: forward, loss, backward, AdamW."""
    device = bench.site.torch_device
    model = models.build(plan, device).train()
    config, experts = model.config, [m for _, m in models.named_experts(model)]
    ids = torch.randint(0, config.vocab_size, (1, tokens), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    some = (experts[0].gate_up_proj, experts[-1].down_proj, model.lm_head.weight)
    compiled = _compilable(model)

    def forward(name: str) -> Tensor:
        config._experts_implementation = name.removesuffix(COMPILED)
        compiled(name.endswith(COMPILED))
        with torch.enable_grad():
            return model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]

    def gradients(name: str) -> tuple[Tensor, ...]:
        if name == "sonicmoe":
            models.bring_sonicmoe()
        value = forward(name)
        return value.detach()[None], *torch.autograd.grad(value, some)

    def step(name: str) -> Tensor:
        value = forward(name)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    kept: dict[int, tuple[Tensor, ...]] = {}
    free = gradients("grouped_mm")
    with models.routing(model, kept):
        truth = gradients("grouped_mm")

    def as_routed(name: str) -> tuple[Tensor, ...]:
        if name.endswith(COMPILED):
            return gradients(name)
        with models.routing(model, kept):
            return gradients(name)

    verdicts = {
        n: bench.judge(plan, n, lambda n=n: as_routed(n), free if n.endswith(COMPILED) else truth)  # type: ignore[misc]
        for n in bench.backends
    }
    work = Work(3 * _flops(model, tokens, tokens, tokens / 2), 12.0 * sum(p.numel() for p in model.parameters()))
    step("grouped_mm")  # the optimizer's moments are there from now on
    held = models.nbytes(model) + sum(t.nbytes for s in optimizer.state.values() for t in s.values())

    def details(name: str) -> dict[str, float]:
        seen = not name.endswith(COMPILED) and device.type == "cuda"
        return {"experts_share": _share(lambda: step(name), experts)} if seen else {}

    call = Call("train_step", f"T{tokens}", tokens)
    yield from bench.records(plan, call, step, verdicts, work, held, details)


def _compilable(model: Any) -> Callable[[bool], None]:
    """Sets whether the model runs with torch.compile: its decoder layers, which share one graph, and the loss."""
    layers, losses = model.model.layers, (model.loss_function, torch.compile(model.loss_function, dynamic=False))
    forward = torch.compile(type(layers[0]).forward, dynamic=False)

    def switch(on: bool) -> None:
        model.loss_function = losses[on]
        for layer in layers:
            vars(layer).pop("forward", None)
            if on:
                layer.forward = MethodType(forward, layer)

    return switch


def _share(step: Callable[[], Any], experts: Sequence[Any]) -> float:
    """Of a step's time on the GPU, what passes inside the experts, forward and backward."""
    marks: list[torch.cuda.Event] = []

    def mark(*_: Any) -> None:
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()

    places = ("forward_pre", "forward", "full_backward_pre", "full_backward")
    hooks = [getattr(m, f"register_{place}_hook")(mark) for m in experts for place in places]
    mark()
    step()
    mark()
    for one in hooks:
        one.remove()
    torch.cuda.synchronize()
    inside = sum(start.elapsed_time(end) for start, end in zip(marks[1:-1:2], marks[2:-1:2], strict=True))
    return float(inside / marks[0].elapsed_time(marks[-1]))


def serve(bench: Bench, plan: Plan, batches: Sequence[int], prefill: int) -> Iterator[Record]:
    """Decode at each batch and a prefill of one sequence: as the model is built, then in each format."""
    device = bench.site.torch_device
    model = models.build(plan, device)
    context = 120 if plan.packed else 256  # a graph holds a sliding window's cache while it is not full
    policy = "graph" if device.type == "cuda" else "eager"
    calls = [Call("decode", f"decode-B{b}-C{context}", b, b, context, policy) for b in batches]
    calls.append(Call("prefill", f"prefill-T{prefill}", prefill))
    if plan.packed:
        for name in (IN_MXFP4, "triton_kernels"):
            yield from _served(bench, plan, model, calls, [n for n in bench.backends if n == name])
        return
    yield from _served(bench, plan, model, calls, [n for n in bench.backends if n in IN_BF16])
    for name in (n for n in bench.backends if n.startswith("expertile-")):
        other = models.quantised(model, plan, name.removeprefix("expertile-"))
        yield from _served(bench, plan, other, calls, [name])


def _served(bench: Bench, plan: Plan, model: Any, calls: Sequence[Call], names: Sequence[str]) -> Iterator[Record]:
    if not names:
        return
    config = model.config
    whole = [models.nbytes(m) for _, m in models.named_experts(model)]
    held, count = models.nbytes(model), getattr(config, "num_local_experts", None) or config.num_experts
    dense = held - sum(whole) - model.get_input_embeddings().weight.nbytes
    first: list[tuple[Call, Work, dict[int, tuple[Tensor, ...]], Tensor]] = []
    for call in calls:
        kept: dict[int, tuple[Tensor, ...]] = {}
        config._experts_implementation = DEQUANTISED
        with models.routing(model, kept):
            truth = _bound_to(model, call)()
        active = sum(own[0].unique().numel() / count * n for own, n in zip(kept.values(), whole, strict=True))
        cache = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * call.batch * call.context
        keys = call.context + 1 if call.context else call.tokens / 2
        first.append(
            (call, Work(_flops(model, call.tokens, call.batch, keys), float(dense + active + cache)), kept, truth)
        )
    foreign = "triton_kernels" in names
    changed = bench.tried(lambda: models.to_triton_kernels(model, LIMIT_OF_LAYER)) if foreign else None
    for call, work, kept, truth in first:
        step = _bound_to(model, call)

        def run(name: str, step: Callable[[], Tensor] = step) -> Tensor:
            config._experts_implementation = "expertile" if foreign else name.partition("-")[0]
            return step()

        here = [n for n in names if n != "batched_mm" or call.tokens <= BATCHED_TOKENS]
        with models.routing(model, kept):
            verdicts = {n: changed or bench.judge(plan, n, lambda n=n: (run(n),), (truth,)) for n in here}  # type: ignore[misc]
        yield from bench.records(plan, call, run, verdicts, work, float(held))


def _bound_to(model: Any, call: Call) -> Callable[[], Tensor]:
    """A call of `model`: -> logits [batch, vocabulary] of each sequence's last token. Tokens, keys and values are drawn
    from the same seed for every model."""
    config, device = model.config, next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(call.tokens)
    shape = (call.batch, call.tokens // call.batch)
    ids = torch.randint(0, config.vocab_size, shape, device=device, generator=generator)
    if not call.context:
        return torch.no_grad()(lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1])
    from transformers import StaticCache
    from transformers.masking_utils import create_masks_for_generate

    cache: Any = StaticCache(config=config, max_cache_len=call.context + 1)
    cache.early_initialization(call.batch, config.num_key_value_heads, config.head_dim, torch.bfloat16, device)
    lengths = torch.full((len(cache.layers),), call.context, device=device)
    for layer, length in zip(cache.layers, lengths.unbind(), strict=True):
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
        layer.cumulative_length = length
    places = torch.full(shape, call.context, device=device)
    same = dict(input_ids=ids, position_ids=places, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def back() -> None:
        lengths.fill_(call.context)
        for layer in cache.layers:
            layer.cumulative_length_int = call.context  # which a sliding window's cache counts on the host

    @torch.no_grad()
    def step() -> Tensor:
        back()
        return model(attention_mask=mask, **same).logits[:, -1]  # type: ignore[no-any-return]

    back()
    mask = create_masks_for_generate(config, model.get_input_embeddings()(ids), None, cache, places)
    return step
