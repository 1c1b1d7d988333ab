"""Train a small Mixture-of-Experts language model on text that ships with Python, beside the same model with experts
in plain PyTorch.

    python examples/train_small_moe.py                                  # a minute or two on a CPU, seconds on a GPU
    python examples/train_small_moe.py --experts 32 --top-k 4 --steps 1000 --out out/train_small_moe.json

Both models read bytes: Python's licence and the standard library's modules. They start from the same weights and see
the same batches; one has `expertile.MoE` layers, the other loops over the experts. What is printed is both losses,
what a step takes, how evenly the experts are used, and a few lines that the trained model writes. The loss curves go to
--out: a page with a plot (.html), or the numbers (.json).
"""

import argparse
import html
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from expertile import MoE
from expertile.moe import Routing, expert_statistics, load_balancing_loss, tokens_per_expert

BYTES = 256


class EagerMoE(MoE):
    """The same layer in plain PyTorch: softmax, topk, a loop over the experts."""

    def forward(self, x: torch.Tensor, *, return_routing: bool = False) -> Any:
        tokens = x.reshape(-1, self.hidden_size)
        scores = F.softmax(self.logits(tokens).float(), dim=-1)
        weights, ids = scores.topk(self.config.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for expert in range(self.config.num_experts):
            row, j = (ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(tokens[row], self.gate_up[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down[expert])
            out = out.index_add(0, row, (weights[row, j, None] * y).to(out.dtype))
        out = out.view(x.shape)
        return (out, Routing(ids, weights, scores)) if return_routing else out


class Block(nn.Module):
    """Causal attention and a Mixture-of-Experts layer, both behind a norm and added to their input."""

    def __init__(self, moe: type[MoE], hidden: int, intermediate: int, heads: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.moe_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.moe = moe(hidden, intermediate, experts, top_k)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """x [B, L, H] -> (the same shape, where its tokens went)."""
        batch, length, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        y, routing = self.moe(self.moe_norm(x), return_routing=True)
        return x + y, routing


class Model(nn.Module):
    """Bytes [B, L] -> logits [B, L, 256] of the next one."""

    def __init__(self, moe: type[MoE], args: argparse.Namespace) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, args.hidden)
        self.positions = nn.Embedding(args.context, args.hidden)
        sizes = (args.hidden, args.intermediate, args.heads, args.experts, args.top_k)
        self.blocks = nn.ModuleList(Block(moe, *sizes) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.hidden)
        nn.init.normal_(self.bytes.weight, std=args.hidden**-0.5)
        nn.init.normal_(self.positions.weight, std=args.hidden**-0.5)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """(logits, load-balancing loss, the experts of every token in each layer)."""
        x = self.bytes(ids) + self.positions.weight[: ids.shape[1]]
        balance, experts = x.new_zeros((), dtype=torch.float32), []
        for block in self.blocks:
            x, routing = block(x)
            balance = balance + load_balancing_loss(routing.scores, routing.topk_ids, routing.scores.shape[1])
            experts.append(routing.topk_ids)
        return F.linear(self.norm(x), self.bytes.weight), balance, experts


@dataclass
class Run:
    """One model on its way: nats per byte and seconds of every step; at the end nats per byte of unseen text and, of
    each layer, the Gini coefficient of its experts' tokens: 0 where all have as many."""

    name: str
    model: Model
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: float = math.nan
    gini: list[float] = field(default_factory=list)


def corpus(path: Path | None, most: int = 8 << 20) -> torch.Tensor:
    """uint8, at most `most` bytes: of the file `path`, or of Python's licence and the standard library's modules."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path] if path is not None else [library / "LICENSE.txt", *sorted(library.glob("*.py"))]
    text = b"\n".join(file.read_bytes() for file in files if file.exists())[:most]
    if not text:
        raise SystemExit(f"--text: expected a file that is not empty, got {path or library}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch_of(text: torch.Tensor, args: argparse.Namespace, generator: torch.Generator) -> torch.Tensor:
    """[batch, context + 1] int64: pieces of the text from random places."""
    starts = torch.randint(text.numel() - args.context, (args.batch, 1), generator=generator)
    return text[starts + torch.arange(args.context + 1)].long().to(args.device)


def loss_of(model: Model, batch: torch.Tensor, args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """(nats per byte, load-balancing loss)."""
    with torch.autocast(args.device.type, dtype=torch.bfloat16, enabled=args.dtype == "bfloat16"):
        logits, balance, _ = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()), balance


def step(run: Run, batch: torch.Tensor, rate: float, args: argparse.Namespace) -> None:
    """One step of AdamW; reading the loss waits for the device, so the time is the step's."""
    start = time.perf_counter()
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.optimizer.zero_grad(set_to_none=True)
    loss, balance = loss_of(run.model, batch, args)
    (loss + 1e-2 * balance).backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.losses.append(loss.item())
    run.seconds.append(time.perf_counter() - start)


@torch.no_grad()
def validate(run: Run, text: torch.Tensor, args: argparse.Namespace) -> None:
    """Fill in `validation` and `gini` from 8 batches of `text`, the same for every model."""
    generator = torch.Generator().manual_seed(args.seed + 1)
    batches = [batch_of(text, args, generator) for _ in range(8)]
    run.validation = statistics.fmean(loss_of(run.model, batch, args)[0].item() for batch in batches)
    experts = run.model(batches[0][:, :-1])[2]
    run.gini = [expert_statistics(tokens_per_expert(ids, args.experts)).gini.item() for ids in experts]


def rate_at(step_index: int, args: argparse.Namespace) -> float:
    """Linear up for a tenth of the steps, then a cosine down to a tenth of --learning-rate."""
    warm = max(1, args.steps // 10)
    if step_index < warm:
        return args.learning_rate * (step_index + 1) / warm
    progress = (step_index - warm) / max(1, args.steps - warm)
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(args: argparse.Namespace) -> list[Run]:
    """All models, step by step on the same batches."""
    text = corpus(args.text)
    cut = text.numel() * 9 // 10
    if text.numel() - cut <= args.context + 1:
        raise SystemExit(f"--text: expected more than {10 * (args.context + 2)} bytes, got {text.numel()}")
    runs = []
    for name, moe in (("expertile", MoE), ("eager", EagerMoE)):
        torch.manual_seed(args.seed)
        model = Model(moe, args).to(args.device)
        runs.append(Run(name, model, torch.optim.AdamW(model.parameters(), weight_decay=0.01)))
    generator = torch.Generator().manual_seed(args.seed)
    shown = {round(i * (args.steps - 1) / 8) for i in range(9)}
    print(f"{sum(p.numel() for p in runs[0].model.parameters()):,} parameters, {text.numel():,} bytes of text")
    print(f"{'step':>6}  {'expertile':>9}  {'eager':>9}  {'difference':>10}   nats per byte")
    for index in range(args.steps):
        batch = batch_of(text[:cut], args, generator)
        for run in runs:
            step(run, batch, rate_at(index, args), args)
        if index in shown:
            ours, theirs = (run.losses[-1] for run in runs)
            print(f"{index + 1:6}  {ours:9.4f}  {theirs:9.4f}  {ours - theirs:+10.1e}", flush=True)
    for run in runs:
        validate(run, text[cut:], args)
    return runs


@torch.no_grad()
def write(run: Run, prompt: str, count: int, args: argparse.Namespace) -> str:
    """`prompt` and `count` bytes more, drawn from the model."""
    generator = torch.Generator().manual_seed(args.seed)
    ids = list(prompt.encode())
    for _ in range(count):
        logits, _, _ = run.model(torch.tensor([ids[-args.context :]], device=args.device))
        chances = F.softmax(logits[0, -1].float().cpu() / 0.7, dim=-1)
        ids.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(ids).decode(errors="replace")


def summary(runs: Sequence[Run], args: argparse.Namespace) -> dict[str, Any]:
    """What goes into the file."""
    return {
        "options": {name: x if isinstance(x, int | float | None) else str(x) for name, x in vars(args).items()},
        "torch": torch.__version__,
        "largest_difference": max(abs(a - b) for a, b in zip(*(run.losses for run in runs), strict=True)),
        "runs": {
            run.name: {
                "losses": run.losses,
                "validation": run.validation,
                "median_step_s": statistics.median(run.seconds),
                "gini": run.gini,
            }
            for run in runs
        },
    }


def page(found: dict[str, Any]) -> str:
    """Both loss curves in HTML."""
    width, height, colours = 860, 380, ("#1565c0", "#ef6c00")
    curves = {name: run["losses"] for name, run in found["runs"].items()}
    top, steps = max(map(max, curves.values())), max(map(len, curves.values()))

    def points(losses: Sequence[float]) -> str:
        across, down = width / max(1, steps - 1), height / top
        return " ".join(f"{i * across:.1f},{height - loss * down:.1f}" for i, loss in enumerate(losses))

    lines = "".join(
        f'<polyline points="{points(losses)}" fill="none" stroke="{colour}" stroke-width="{thick}"/>'
        for (losses, colour, thick) in zip(curves.values(), colours, (4, 1.5), strict=True)
    )
    rows = "".join(
        f'<tr><td style="color:{colour}">{name}</td><td>{run["losses"][-1]:.4f}</td><td>{run["validation"]:.4f}</td>'
        f"<td>{run['median_step_s'] * 1e3:.1f}</td></tr>"
        for (name, run), colour in zip(found["runs"].items(), colours, strict=True)
    )
    return (
        '<!doctype html><meta charset="utf-8"><title>A small MoE, trained twice</title>'
        "<style>body{font:16px system-ui;margin:2rem auto;max-width:60rem}td,th{padding:.2rem 1rem;text-align:right}"
        "svg{overflow:visible;border-left:1px solid;border-bottom:1px solid}</style>"
        f"<h1>Nats per byte over {steps} steps</h1>"
        f'<svg viewBox="0 0 {width} {height}" width="100%" role="img" aria-label="loss curves">{lines}'
        f'<text x="6" y="14">{top:.2f}</text><text x="6" y="{height - 6}">0</text></svg>'
        f"<table><tr><th></th><th>last step</th><th>unseen text</th><th>ms a step</th></tr>{rows}</table>"
        f"<p>Largest difference of the two losses in a step: {found['largest_difference']:.1e}</p>"
        f"<pre>{html.escape(json.dumps(found['options'], indent=1))}</pre>"
    )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    for name, default, meaning in (
        ("steps", 300, "steps of training"),
        ("batch", 16, "sequences in a step"),
        ("context", 128, "bytes in one"),
        ("layers", 2, "blocks"),
        ("hidden", 128, "width"),
        ("intermediate", 128, "width of an expert"),
        ("heads", 4, "of attention"),
        ("experts", 8, "in each layer"),
        ("top-k", 2, "experts of a token"),
        ("seed", 0, "of weights and batches"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of AdamW, at its largest (default: 3e-3)")
    parser.add_argument("--text", type=Path, help="a file to learn (default: the standard library)")
    parser.add_argument("--device", help="cuda or cpu (default: a GPU if there is one)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="bfloat16: autocast (default: on a GPU bfloat16)"
    )
    parser.add_argument("--out", type=Path, default=Path("out/train_small_moe.html"), help=".html or .json")
    args = parser.parse_args(argv)
    if args.out.suffix not in (".html", ".json"):
        parser.error(f"--out: expected a name that ends in .html or .json, got {args.out}")
    for name in ("steps", "batch", "context", "layers", "hidden", "intermediate", "heads", "experts", "top_k"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(args, name)}")
    if args.top_k > args.experts:
        parser.error(f"--top-k: expected at most --experts {args.experts}, got {args.top_k}")
    if args.text is not None and not args.text.is_file():
        parser.error(f"--text: expected a file, got {args.text}")
    if args.hidden % args.heads:
        parser.error(f"--hidden: expected a multiple of --heads {args.heads}, got {args.hidden}")
    args.device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    args.dtype = args.dtype or ("bfloat16" if args.device.type == "cuda" else "float32")
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = arguments(argv)
    runs = train(args)
    found = summary(runs, args)
    print(f"\n{'':10}  {'last step':>9}  {'unseen':>9}  {'ms a step':>9}  Gini of the experts' tokens, by layer")
    for name, run in found["runs"].items():
        ginis = " ".join(f"{gini:.2f}" for gini in run["gini"])
        step_ms = run["median_step_s"] * 1e3
        print(f"{name:10}  {run['losses'][-1]:9.4f}  {run['validation']:9.4f}  {step_ms:9.1f}  {ginis}")
    print(f"\nThe expertile model writes:\n{write(runs[0], 'def ', 240, args)}\n")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found) if args.out.suffix == ".json" else page(found))
    print(f"written: {args.out}")
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
