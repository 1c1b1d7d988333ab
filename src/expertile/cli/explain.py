"""explain: what a workload costs at least, and which backend takes it."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer import Option

from expertile.cli.complete import gpus, operators_explained
from expertile.cli.given import given
from expertile.cli.output import print_json
from expertile.cli.traffic import GROUPED, OPERATORS, OPTIONS, as_answer, records_in, show_traffic, subject_of
from expertile.device import Device
from expertile.lab.race.routing import draw
from expertile.lab.race.workloads import ragged_m, wgrad
from expertile.lab.traffic.explain import explain_grouped, explain_subject
from expertile.ops.grouped_mm.explain import Explanation, explain_problem
from expertile.ops.grouped_mm.problem import Layout


def explain(
    ctx: typer.Context,
    op: Annotated[
        str,
        Option(
            help=f"Also memory traffic, of one operator: {', '.join(OPERATORS)}.", autocompletion=operators_explained
        ),
    ] = "",
    tokens: Annotated[int, Option(help="Tokens; each takes top-k rows.", min=0)] = 16384,
    top_k: Annotated[int, Option(help="Experts that each token goes to.", min=1)] = 1,
    groups: Annotated[int, Option(help="Groups (experts).", min=1)] = 8,
    k: Annotated[int, Option("-k", "--k", help="Summed dimension (rows of dW for wgrad).", min=1)] = 4096,
    n: Annotated[int, Option("-n", "--n", help="Columns of the result.", min=1)] = 14336,
    product: Annotated[
        str, Option(help="forward (a [rows, K] x weights [G, N, K]), dgrad (weights in the other order) or wgrad.")
    ] = "forward",
    dtype: Annotated[str, Option(help="bf16, fp16 or fp32.")] = "bf16",
    routing: Annotated[
        str, Option(help="balanced, uniform, uneven(d), skewed, zipf(s), one-expert, half-empty, a FILE.json / .npz.")
    ] = "uniform",
    seed: Annotated[int, Option(help="Seed of the routing.", min=0)] = 0,
    gpu: Annotated[
        str, Option(help="A GPU by name (RTX 4090, H200 …); by default this machine's.", autocompletion=gpus)
    ] = "",
    rows: Annotated[int | None, Option(help="Rows (softmax, norms), or of each grid (laplacian).")] = None,
    cols: Annotated[int | None, Option(help="Columns of a row or grid.")] = None,
    batch: Annotated[int | None, Option(help="Sequences (attention).")] = None,
    heads: Annotated[int | None, Option(help="Query heads (attention).")] = None,
    kv_heads: Annotated[int | None, Option(help="Key heads; as many as query heads by default.")] = None,
    seq_len: Annotated[int | None, Option(help="Queries of a sequence (attention).")] = None,
    k_len: Annotated[int | None, Option(help="Keys of a sequence; as many as queries by default.")] = None,
    head_dim: Annotated[int | None, Option(help="Elements of a head (attention).")] = None,
    causal: Annotated[bool | None, Option("--causal", help="Later keys are masked (attention).")] = None,
    grids: Annotated[int | None, Option(help="Grids of a batch (laplacian).")] = None,
    boundary: Annotated[str | None, Option(help="zero, replicate, circular or interior (laplacian).")] = None,
    elements: Annotated[int | None, Option(help="Elements (add_scalar).")] = None,
    measured: Annotated[bool, Option("--measured", help="With --op: count bytes with Nsight Compute.")] = False,
    records: Annotated[Path | None, Option(help="Your records (a file or folder) instead of ours.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """One workload in numbers: FLOPs, bytes, bound, waves, padding, launch share; which backend, and why.

    With --op the memory traffic of any operator: unfused, as torch does it, and as this package does.
    """
    console = Console(emoji=False)
    typed = given(ctx)
    of_operators = {name: value for name, value in typed.items() if name in OPTIONS}
    if op and op != GROUPED:
        for name in ("tokens", "top_k", "groups", "k", "n", "product", "routing", "seed"):
            if name in typed:
                raise ValueError(f"{name}: expected without --op or with --op {GROUPED}, got it with --op {op}")
        device = Device.by_name(gpu) if gpu else Device.current()
        explained = explain_subject(subject_of(op, of_operators, dtype), device, records_in(records))
        if as_json:
            print_json(as_answer(explained))
        else:
            show_traffic(explained, measured, console)
        return
    for name in (*of_operators, *(n for n in ("measured", "records") if n in typed and not op)):
        raise ValueError(f"{name}: expected with --op and one of {', '.join(OPERATORS)}, got it without")
    if dtype not in ("bf16", "fp16", "fp32"):
        raise ValueError(f"dtype: expected bf16, fp16 or fp32, got {dtype!r}")
    if product not in ("forward", "dgrad", "wgrad"):
        raise ValueError(f"product: expected forward, dgrad or wgrad, got {product!r}")
    here = Device.current()
    device = Device.by_name(gpu) if gpu else here
    answers = []
    for drawn in draw(routing, tokens, groups, top_k, seed):
        if product == "wgrad":
            workload = wgrad(product, "", drawn.group_sizes, k, n, dtype, routing=drawn.label)
        else:
            order = "nk" if product == "forward" else "kn"
            workload = ragged_m(product, "", drawn.group_sizes, k, n, dtype, b_layout=order, routing=drawn.label)
        problem = workload.problem(device.kind)
        explanation = explain_problem(problem, device)
        if as_json:
            answers.append({"routing": drawn.label, **_answer(explanation)})
            continue
        console.print(f"{escape(drawn.label)}: rows per group {_summary(drawn.group_sizes)}", highlight=False)
        console.print(escape(str(explanation)), highlight=False)
        if op and problem.layout is not Layout.RAGGED_M:
            console.print("Traffic is counted for ragged rows (forward and dgrad) only.")
        elif op:
            explained = explain_grouped(problem, drawn.group_sizes, device, records_in(records))
            show_traffic(explained, measured, console)
    if as_json:
        print_json(answers)
    elif device.name != here.name:
        note = "is not this machine's device: nothing was measured here; each line says where its estimate is from."
        console.print(f"[dim]{escape(device.name)} {note}[/dim]")


def _answer(found: Explanation) -> dict[str, Any]:
    """The figures of an explanation under names of their own; times in seconds."""
    p, choice = found.problem, found.choice
    return {
        "device": found.device.name,
        "shape": {"layout": p.layout.value, "groups": p.groups, "m": p.m, "n": p.n, "k": p.k},
        "work": found.work,
        "bound": found.bound,
        "backend": choice and choice.backend.name,
        "config": choice and choice.config,
        "estimates": [
            {"backend": e.backend, "time_s": e.seconds, "reason": e.reason}
            for e in (choice.estimates if choice else ())
        ],
        "refusal": found.refusal,
    }


def _summary(sizes: tuple[int, ...], most: int = 16) -> str:
    shown = ", ".join(map(str, sizes[:most])) + (", …" if len(sizes) > most else "")
    return f"{shown} (smallest {min(sizes)}, largest {max(sizes)}, {sizes.count(0)} empty)"
