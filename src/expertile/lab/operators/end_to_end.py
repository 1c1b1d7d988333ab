"""Whole models of transformers, end to end: a training step, and decode and prefill when serving. Random weights.

    expertile bench --preset end-to-end-train      Qwen3-30B-A3B with 12 layers, 8192 tokens, fused AdamW in bfloat16
    expertile bench --preset end-to-end-serve      Qwen3-30B-A3B and gpt-oss-120b at full size

Everything beside the experts is transformers' own, attention included. A decode step reads a static cache of random
keys and is replayed from a CUDA graph; a prefill of one sequence writes no cache. The presets hold no workloads of
`bench.run`: a model fills the memory, and its candidates share one set of parameters.

Gate: logits (training: loss and three gradients) against transformers' grouped_mm on the same weights, quantised ones
dequantised layer by layer. Both are called with the routing of the first pass. A compiled step keeps its own routing,
and has wider limits.

Bounds: a training step takes 6 FLOPs a token for each active parameter, and reads and writes parameters and moments
once. Decode reads the cache, the dense weights and the experts that have tokens; 2 FLOPs a token and parameter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from expertile.lab.measure.env import Env, timestamp
from expertile.lab.measure.environment import capture_env, new_run_id
from expertile.lab.measure.interleaved import Budget, Failure, TimedCall, failure_of, release, time_interleaved
from expertile.lab.operators import _models as models
from expertile.lab.operators._models import DEQUANTISED, Plan
from expertile.lab.operators.transformers_layers import BATCHED_TOKENS, MODELS
from expertile.lab.race.case import Site
from expertile.lab.race.memory import peak_memory
from expertile.lab.race.operator import Operator, Verdict, Workload
from expertile.lab.race.record import PEAK_BYTES, TOKENS_PER_S, Record, append, measured
from expertile.roofline import Work, bound

OPERATORS: tuple[Operator, ...] = ()
TRAIN, SERVE = "end-to-end-train", "end-to-end-serve"
PRESETS: Mapping[str, Callable[[], tuple[Workload, ...]]] = MappingProxyType({TRAIN: tuple, SERVE: tuple})
COMPILED = "-compiled"
TRAINERS = ("expertile", "grouped_mm", "sonicmoe", f"grouped_mm{COMPILED}", f"expertile{COMPILED}")
SERVERS = (
    "expertile",
    "grouped_mm",
    "batched_mm",
    "expertile-mxfp4",
    "expertile-int4",
    "expertile-fp8",
    "triton_kernels",
)
# Relative error of logits and gradients: what bfloat16 rounds in a layer, added over the layers like a random walk. FP8
# rounds activations to 4 bits too, and a compiled step routes some tokens otherwise.
LIMIT_OF_LAYER, FP8_LIMIT, COMPILED_LIMIT = 0.025, 0.2, 0.3
_DENSE = {"Qwen3-30B-A3B": dict(vocab_size=151936, num_attention_heads=32, num_key_value_heads=4, head_dim=128)}


def _plan(name: str, layers: int, **more: Any) -> Plan:
    of = next(model for model in MODELS if model.name == name)
    return Plan(name, of.family, {**of.options, **_DENSE.get(name, {}), "num_hidden_layers": layers}, **more)


_TOY = dict(
    hidden_size=64, num_hidden_layers=2, vocab_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)


def plans(preset: str, device: torch.device) -> tuple[Plan, ...]:
    """At full size for a GPU, with two small layers for a CPU."""
    if device.type == "cuda":
        if preset == TRAIN:
            return (_plan("Qwen3-30B-A3B", 12),)
        return (_plan("Qwen3-30B-A3B", 48), _plan("gpt-oss-120b", 36, attention="eager", packed=True))
    qwen = dict(moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
    oss = dict(intermediate_size=64, num_local_experts=4, num_experts_per_tok=2)
    toys = (
        Plan("toy-qwen3", "Qwen3Moe", {**_TOY, **qwen}),
        Plan("toy-gpt-oss", "GptOss", {**_TOY, **oss}, attention="eager", packed=True),
    )
    return toys[:1] if preset == TRAIN else toys


@dataclass(frozen=True)
class Call:
    """One thing that a model does: `run(model)` -> its results. `context`: tokens in the cache."""

    op: str
    name: str
    tokens: int
    batch: int
    context: int
    policy: str


def _limit(plan: Plan, name: str) -> float:
    least = FP8_LIMIT if name.endswith("fp8") else COMPILED_LIMIT if name.endswith(COMPILED) else 0.0
    return max(least, LIMIT_OF_LAYER * math.sqrt(plan.options["num_hidden_layers"]))


@dataclass(frozen=True)
class _Bench:
    site: Site
    budget: Budget
    env: Env
    id: str
    preset: str
    wanted: Callable[[str], bool]

    def records(
        self,
        plan: Plan,
        call: Call,
        calls: Mapping[str, Callable[[], Any]],
        verdicts: Mapping[str, Verdict | Failure],
        work: Mapping[str, Work],
        held: Mapping[str, float],
        details: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Iterator[Record]:
        """tokens/s of every candidate, timed in turns where it is right, and then its memory: `held` and the peak."""
        import transformers

        device = self.site.torch_device
        right = [n for n, v in verdicts.items() if isinstance(v, Verdict) and v.ok]
        timed = [TimedCall(n, lambda _, run=calls[n]: run()) for n in right]
        outcomes = time_interleaved(timed, policy=call.policy, device=device, budget=self.budget)
        release(device)
        for name, verdict in verdicts.items():
            limit = bound(work[name], self.site.device, "fp8" if name.endswith("fp8") else "bf16")
            status = verdict.status if isinstance(verdict, Failure) else "ok" if verdict.ok else "wrong"
            fields: dict[str, Any] = dict(
                op=call.op,
                workload=f"{self.preset}/{plan.name}-{call.name}",
                shape={"model": plan.name, "layers": plan.options["num_hidden_layers"], "batch": call.batch}
                | {"tokens": call.tokens, "context": call.context},
                dtype="bf16",
                backend=name,
                policy=call.policy,
                run=self.id,
                details={"transformers": transformers.__version__, **(details or {}).get(name, {})},
            )
            errors = {key: getattr(verdict, key, None) for key in ("rel_error", "max_error")}
            one = measured(
                work=work[name],
                limit=limit,
                outcome=outcomes.get(name),
                status=status,
                reason=verdict.reason,
                env=self.env,
                **fields,
                **errors,
            )
            low, high = one.ci95 or (0.0, 0.0)
            ci95 = (call.tokens / high, call.tokens / low) if low else None
            value, best = one.value and call.tokens / one.value, one.bound and call.tokens / one.bound
            yield replace(one, metric=TOKENS_PER_S, value=value, ci95=ci95, bound=best)
            if one.status == "ok":
                with torch.no_grad():
                    peak = held[name] + peak_memory(calls[name], device)
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
    prefill: int = 8192,
    layers: int | None = None,
) -> Iterator[Record]:
    """The records of a preset, each in `out_path` as soon as it is made; models one after another.

    `seconds`: of timing for each workload; `backends`: some of TRAINERS or SERVERS; `only`: patterns of models' names;
    `layers`: fewer than the models have. A CPU takes small models, and few tokens.
    """
    on_gpu = site.torch_device.type == "cuda"
    known = backends or (TRAINERS if preset == TRAIN else SERVERS)
    bench = _Bench(
        site,
        Budget(seconds) if on_gpu else Budget(0.1, 3, 3),
        capture_env(site.device),
        new_run_id(),
        preset,
        lambda name: name in known and (on_gpu or COMPILED not in name),
    )
    for plan in plans(preset, site.torch_device):
        if any(fnmatch(plan.name, pattern) for pattern in only):
            if layers is not None:
                plan = replace(plan, options={**plan.options, "num_hidden_layers": layers})
            found = train(bench, plan, 8192 if on_gpu else 64) if preset == TRAIN else None
            for record in found or serve(bench, plan, batches, prefill if on_gpu else 32):
                if out_path is not None:
                    append(out_path, record)
                yield record
            release(site.torch_device)


def line(record: Record) -> str:
    """A record in a few words."""
    name = f"{record.workload.partition('/')[2]}  {record.backend}: "
    if record.value is None or record.status != "ok":
        return f"{name}{record.status}, {record.reason}"
    if record.metric == PEAK_BYTES:
        return f"{name}{record.value / 1e9:.2f} GB at the peak"
    share = record.details.get("experts_share")
    inside = "" if share is None else f", {share:.0%} of the step in the experts"
    bound_ = f", {record.value / record.bound:.0%} of the bound" if record.bound else ""
    return f"{name}{record.value:.5g} tokens/s{bound_}{inside}, error {record.rel_error or 0:.1e}"


def _sizes(model: Any) -> tuple[float, float, float]:
    """Parameters beside experts and embedding; those of one expert over all layers; FLOPs of attention for each query
    and key."""
    c, inside = model.config, {id(p) for _, m in models.named_experts(model) for p in m.parameters()}
    dense = sum(p.numel() for n, p in model.named_parameters() if id(p) not in inside and "embed_tokens" not in n)
    intermediate = getattr(c, "moe_intermediate_size", None) or c.intermediate_size
    expert = 3 * c.hidden_size * intermediate * c.num_hidden_layers
    return float(dense), float(expert), 4.0 * c.num_attention_heads * c.head_dim * c.num_hidden_layers


def _flops(model: Any, tokens: int, pairs: float) -> float:
    """Of a forward pass with so many pairs of query and key."""
    dense, expert, attention = _sizes(model)
    return 2 * tokens * (dense + model.config.num_experts_per_tok * expert) + attention * pairs


def _judge(fn: Callable[[], Verdict], device: torch.device) -> Verdict | Failure:
    try:
        return fn()
    except ImportError as error:
        return Failure("missing", f"{type(error).__name__}: {error}"[:300])
    except Exception as error:
        return failure_of(error, device)
    finally:
        release(device)


def train(bench: _Bench, plan: Plan, tokens: int) -> Iterator[Record]:
    """A step of `tokens` tokens: forward, loss, backward, AdamW."""
    device = bench.site.torch_device
    model = models.build(plan, device).train()
    config, experts = model.config, [m for _, m in models.named_experts(model)]
    ids = torch.randint(0, config.vocab_size, (1, tokens), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def loss() -> Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]

    forwards = {n: torch.compile(loss, dynamic=False) if n.endswith(COMPILED) else loss for n in TRAINERS}
    some = (experts[0].gate_up_proj, experts[-1].down_proj, model.lm_head.weight)

    def gradients(name: str) -> tuple[Tensor, ...]:
        config._experts_implementation = name.removesuffix(COMPILED)
        value = forwards[name]()
        return value.detach()[None], *torch.autograd.grad(value, some)

    def step(name: str) -> Tensor:
        config._experts_implementation = name.removesuffix(COMPILED)
        with torch.enable_grad():
            value = forwards[name]()
            value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    kept: dict[int, tuple[Tensor, ...]] = {}
    own = gradients("grouped_mm")
    with models.routing(model, kept):
        truth = gradients("grouped_mm")

    def right(name: str) -> Verdict:
        models.bring(name)
        if name.endswith(COMPILED):
            return models.within(gradients(name), own, _limit(plan, name))
        with models.routing(model, kept):
            return models.within(gradients(name), truth, _limit(plan, name))

    names = [n for n in TRAINERS if bench.wanted(n)]
    verdicts = {n: _judge(lambda n=n: right(n), device) for n in names}  # type: ignore[misc]
    good = [n for n in names if isinstance(v := verdicts[n], Verdict) and v.ok]
    for name in good:
        step(name)  # the optimizer's moments are there from now on
    held = models.nbytes(model) + sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    details = {n: {"experts_share": _share(lambda n=n: step(n), experts, device)} for n in good if COMPILED not in n}  # type: ignore[misc]
    flops = 3 * _flops(model, tokens, tokens * tokens / 2)
    work = Work(flops, 12.0 * sum(p.numel() for p in model.parameters()))
    call = Call("train_step", f"T{tokens}", tokens, 1, 0, "eager")
    calls = {n: lambda n=n: step(n) for n in good}  # type: ignore[misc]
    yield from bench.records(
        plan, call, calls, verdicts, dict.fromkeys(names, work), dict.fromkeys(names, held), details
    )


def _share(step: Callable[[], Any], experts: Sequence[Any], device: torch.device) -> float:
    """Of a step's time, what passes inside the experts, forward and backward."""
    marks: list[Any] = []

    def mark(*_: Any) -> None:
        if device.type == "cuda":
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())

    hooks = [
        hook
        for m in experts
        for hook in (
            m.register_forward_pre_hook(mark),
            m.register_forward_hook(mark),
            m.register_full_backward_pre_hook(mark),
            m.register_full_backward_hook(mark),
        )
    ]
    mark()
    step()
    mark()
    for one in hooks:
        one.remove()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        marks = [marks[0].elapsed_time(later) for later in marks]
    pairs = zip(marks[1:-1:2], marks[2:-1:2], strict=True)
    return float(sum(end - start for start, end in pairs) / (marks[-1] - marks[0]))


def serve(bench: _Bench, plan: Plan, batches: Sequence[int], prefill: int) -> Iterator[Record]:
    """Decode at each batch and a prefill of one sequence: of the model as it is built, then in each format, then on
    triton_kernels."""
    device = bench.site.torch_device
    model = models.build(plan, device)
    first = ("expertile-mxfp4",) if plan.packed else ("expertile", "grouped_mm", "batched_mm")
    context = 120 if plan.packed else 256  # a sliding window's cache is captured in a graph while it is not full
    policy = "graph" if device.type == "cuda" else "eager"
    calls = [Call("decode", f"decode-B{b}-C{context}", b, b, context, policy) for b in batches]
    calls.append(Call("prefill", f"prefill-T{prefill}", prefill, 1, 0, "eager"))
    yield from _served(bench, plan, model, calls, [n for n in first if bench.wanted(n)])
    if plan.packed:
        if bench.wanted("triton_kernels"):
            yield from _served(bench, plan, model, calls, ["triton_kernels"])
        return
    for name in (n for n in SERVERS if n.startswith("expertile-") and bench.wanted(n)):
        other = models.quantised(model, plan, name.removeprefix("expertile-"))
        yield from _served(bench, plan, other, calls, [name])
        del other
        release(device)


def _served(bench: _Bench, plan: Plan, model: Any, calls: Sequence[Call], names: Sequence[str]) -> Iterator[Record]:
    device, config = bench.site.torch_device, model.config
    experts = [m for _, m in models.named_experts(model)]
    whole = [models.nbytes(m) for m in experts]
    count = experts[0].num_experts
    dense = models.nbytes(model) - sum(whole) - model.get_input_embeddings().weight.nbytes
    held, foreign = models.nbytes(model), "triton_kernels" in names
    verdict: Verdict | Failure = Verdict(True, 0.0, 0.0)
    truths: dict[Call, tuple[Work, dict[int, Any], Tensor]] = {}
    for call in calls:
        kept: dict[int, tuple[Tensor, ...]] = {}
        config._experts_implementation = DEQUANTISED
        with models.routing(model, kept):
            truth = _bound_to(model, call)()
        active = sum(own[0].unique().numel() / count * n for own, n in zip(kept.values(), whole, strict=True))
        keys = call.context + 1 if call.context else call.tokens / 2
        cache = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * call.batch * call.context
        work = Work(_flops(model, call.tokens, call.tokens * keys), float(dense + active + cache))
        truths[call] = work, {} if foreign else kept, truth[:0] if foreign else truth
        release(device)
    if foreign:
        verdict = _judge(lambda: models.to_triton_kernels(model, LIMIT_OF_LAYER), device)
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else held

    for call in calls:
        work, kept, truth = truths[call]
        run = _bound_to(model, call)

        def as_(name: str, run: Callable[[], Tensor] = run) -> Tensor:
            if not foreign:
                config._experts_implementation = name.partition("-")[0]
            return run()

        def right(name: str, as_: Any = as_, kept: Any = kept, truth: Tensor = truth) -> Verdict:
            with models.routing(model, kept):
                return models.within((as_(name),), (truth,), _limit(plan, name))

        here = [n for n in names if n != "batched_mm" or call.tokens <= BATCHED_TOKENS]
        verdicts = {n: verdict if foreign else _judge(lambda n=n: right(n), device) for n in here}  # type: ignore[misc]
        runs = {n: lambda n=n, as_=as_: as_(n) for n in here}  # type: ignore[misc]
        works, helds = dict.fromkeys(here, work), dict.fromkeys(here, float(held))
        yield from bench.records(
            plan, call, runs, verdicts, works, helds, dict.fromkeys(here, {"weights_nbytes": held})
        )


def _bound_to(model: Any, call: Call) -> Callable[[], Tensor]:
    """A step on `model`: -> logits [batch, vocabulary] of the last token of each sequence. The same tokens, and keys
    and values in the cache, for every model."""
    config, device = model.config, next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(call.tokens)
    shape = (call.batch, call.tokens // call.batch)
    ids = torch.randint(0, config.vocab_size, shape, device=device, generator=generator)
    if not call.context:
        return torch.no_grad()(lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1])
    from transformers import StaticCache
    from transformers.masking_utils import create_masks_for_generate

    cache = StaticCache(config=config, max_cache_len=call.context + 1)
    heads, width = config.num_key_value_heads, config.head_dim
    cache.early_initialization(call.batch, heads, width, torch.bfloat16, device)
    lengths = torch.full((len(cache.layers),), call.context, device=device)
    for layer, length in zip(cache.layers, lengths.unbind(), strict=True):
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
        layer.cumulative_length = length

    def back() -> None:
        lengths.fill_(call.context)
        for layer in cache.layers:
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = call.context

    back()
    places = torch.full(shape, call.context, device=device)
    mask = create_masks_for_generate(config, model.get_input_embeddings()(ids), None, cache, places)

    @torch.no_grad()
    def step() -> Tensor:
        back()
        found = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return found.logits[:, -1]  # type: ignore[no-any-return]

    return step
