"""How tokens are spread over experts: distributions by name, drawn from a seed, or read from a file.

With T tokens, E experts and top-k, every token chooses k distinct experts, so the rows of all experts sum to T·k.

| spec                | rows of each expert, or choice of token t                                            |
|---------------------|--------------------------------------------------------------------------------------|
| `balanced`          | equal, the first experts taking one more where E does not divide T·k                 |
| `uniform`           | k experts drawn without replacement, all equally likely (k = 1: a multinomial)       |
| `uneven(d)`         | proportional to 1 + U(-d, d), rounded to the exact sum; d = 0.15 by default          |
| `zipf(s)`           | k drawn without replacement, one by one with probability ∝ rank⁻ˢ; s = 1 by default  |
| `skewed(s, sigma)`  | the k largest of -s·ln(e + 1) + sigma·z[t, e], z ~ N(0, 1); by default s = 1,        |
|                     | sigma = 0.5                                                                          |
| `one-expert`        | the same k experts for every token: with k = 1, one expert takes all                 |
| `half-empty`        | `uniform` over half of the experts (at least k); the others get nothing              |
| `FILE.json`, `.npz` | real counts or top-k ids for each layer; see `routing_file.py`                       |

Which expert has which rank in `zipf`, takes all, or is empty, is a permutation drawn from the seed. `skewed` is the
"token routing simulation" of the benchmark behind report 003 (benchmark/moe_grouped_gemm/routing.py); its ranks are the
expert indices. Drawing without replacement uses the Gumbel top-k trick (Kool, van Hoof, Welling, ICML 2019): the k
largest of ln p_e + Gumbel noise. It flattens the shares when k approaches E.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expertile.lab.race.routing_file import SUFFIXES, RoutingFile, read_routing_file

_CHUNK = 4096  # tokens drawn at a time: bounds the [tokens, experts] noise in memory


@dataclass(frozen=True)
class Routing:
    """A distribution by name with all its arguments, or a routing file."""

    name: str
    args: tuple[float, ...] = ()
    file: RoutingFile | None = None

    @property
    def spec(self) -> str:
        """The spec in full, e.g. "zipf(1)" for "zipf"."""
        return f"{self.name}({', '.join(f'{x:g}' for x in self.args)})" if self.args else self.name


@dataclass(frozen=True)
class Draw:
    """Rows of each expert, and how they came about: `label` holds the spec, tokens, top-k and seed, or the file and
    layer. `layer`: its name in a routing file, otherwise empty."""

    label: str
    group_sizes: tuple[int, ...]
    layer: str = ""


def parse_routing(spec: str) -> Routing:
    """A spec of the table above -> Routing, with defaults filled in and files read. ValueError names what was expected
    and what came; FileNotFoundError."""
    text = spec.strip()
    if text.endswith(SUFFIXES):
        file = read_routing_file(text)
        return Routing(Path(text).name, file=file)
    match = re.fullmatch(r"([a-z][a-z-]*)\s*(?:\((.*)\))?", text)
    if match is None or match[1] not in _DISTRIBUTIONS:
        raise ValueError(
            f"routing: expected {', '.join(usage())} or a file ending in {' or '.join(SUFFIXES)}, got {spec!r}"
        )
    name, parameters = match[1], _DISTRIBUTIONS[match[1]].parameters
    given = [part.strip() for part in match[2].split(",")] if (match[2] or "").strip() else []
    if len(given) > len(parameters):
        raise ValueError(f"routing: {name}: expected at most {len(parameters)} arguments, got {len(given)}: {spec!r}")
    args = []
    for i, (parameter, default, least, most) in enumerate(parameters):
        try:
            value = float(given[i]) if i < len(given) else default
        except ValueError:
            raise ValueError(f"routing: {name}: {parameter}: expected a number, got {given[i]!r}") from None
        if not least <= value <= most:
            raise ValueError(f"routing: {name}: {parameter}: expected {least:g} to {most:g}, got {value:g}")
        args.append(value)
    return Routing(name, tuple(args))


def usage() -> tuple[str, ...]:
    """The known distributions with their parameters, e.g. "zipf(s)"."""
    return tuple(
        f"{name}({', '.join(p[0] for p in d.parameters)})" if d.parameters else name
        for name, d in _DISTRIBUTIONS.items()
    )


def draw(routing: Routing | str, tokens: int, num_experts: int, top_k: int = 1, seed: int = 0) -> tuple[Draw, ...]:
    """Rows of each expert: one draw of a distribution, or one for each layer of a routing file, which states its own
    tokens and top-k. ValueError for a file of another `num_experts`, top_k not in 1 … num_experts, or tokens < 0."""
    routing = parse_routing(routing) if isinstance(routing, str) else routing
    if routing.file is not None:
        if routing.file.num_experts != num_experts:
            raise ValueError(
                f"num_experts: expected {routing.file.num_experts} as {routing.name} has, got {num_experts}"
            )
        return tuple(Draw(f"{routing.name}:{name}", rows, name) for name, rows in routing.file.counts.items())
    label = f"{routing.spec} tokens={tokens} top_k={top_k} seed={seed}"
    return (Draw(label, rows_of_experts(routing, tokens, num_experts, top_k, seed)),)


@lru_cache(maxsize=1024)
def rows_of_experts(routing: Routing, tokens: int, num_experts: int, top_k: int, seed: int) -> tuple[int, ...]:
    """Those of `draw`. Presets and tables of one run ask for the same ones again."""
    counts, choices, _ = _drawn(routing, tokens, num_experts, top_k, seed)
    if counts is None:
        counts = sum((np.bincount(c.ravel(), minlength=num_experts) for c in choices), np.zeros(num_experts, np.int64))
    return tuple(int(c) for c in counts)


def topk_ids(routing: Routing | str, tokens: int, num_experts: int, top_k: int = 1, seed: int = 0) -> NDArray[np.int32]:
    """The experts that each token chooses, [tokens, top_k] int32, distinct within a token; their rows are those of
    `draw`. ValueError as `draw` raises it, and for a routing file (whose ids are in its layers)."""
    routing = parse_routing(routing) if isinstance(routing, str) else routing
    if routing.file is not None:
        raise ValueError(f"routing: expected a distribution, got the file {routing.name}")
    counts, choices, rng = _drawn(routing, tokens, num_experts, top_k, seed)
    if counts is not None:
        return rng.permutation(_spread(counts, tokens, top_k))
    return np.concatenate([np.empty((0, top_k), np.int32), *choices])


def _drawn(
    routing: Routing, tokens: int, num_experts: int, top_k: int, seed: int
) -> tuple[NDArray[np.int64] | None, Sequence[NDArray[np.int32]], np.random.Generator]:
    """Rows of each expert, or the choices in chunks of tokens, each token's largest scores; and the generator after
    that."""
    if tokens < 0:
        raise ValueError(f"tokens: expected 0 or more, got {tokens}")
    if num_experts < 1:
        raise ValueError(f"num_experts: expected 1 or more, got {num_experts}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k: expected 1 to {num_experts} (num_experts), got {top_k}")
    if tokens * top_k >= 2**31:
        raise ValueError(
            f"tokens: expected tokens · top_k below 2^31, as ends of groups are int32, got {tokens} · {top_k}"
        )
    distribution, rng = _DISTRIBUTIONS[routing.name], np.random.default_rng(seed)
    if distribution.counts is not None:
        return distribution.counts(rng, tokens, num_experts, top_k, *routing.args), (), rng
    prior = distribution.prior(rng, num_experts, top_k, *routing.args)
    chunks = []
    for start in range(0, tokens, _CHUNK):
        scores = prior + distribution.noise(rng, (min(_CHUNK, tokens - start), num_experts), *routing.args)
        chunks.append(np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k].astype(np.int32))
    return None, chunks, rng


def _spread(counts: NDArray[np.int64], tokens: int, top_k: int) -> NDArray[np.int32]:
    """Top-k ids [tokens, top_k] with exactly these counts, none of which exceeds `tokens`. Token t takes places t, t +
    T, t + 2T … of the experts laid end to end; no expert fills more than T places in a row, so a token's ids differ."""
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts).reshape(top_k, tokens).T


def _balanced(rng: np.random.Generator, tokens: int, num_experts: int, top_k: int) -> NDArray[np.int64]:
    each, more = divmod(tokens * top_k, num_experts)
    return each + (np.arange(num_experts) < more)


def _uneven(rng: np.random.Generator, tokens: int, num_experts: int, top_k: int, spread: float) -> NDArray[np.int64]:
    """Largest-remainder rounding of the shares; no expert may get more rows than there are tokens."""
    rows = tokens * top_k
    shares = 1.0 + rng.uniform(-spread, spread, num_experts)
    exact = rows * shares / shares.sum()
    counts = np.minimum(np.floor(exact).astype(np.int64), tokens)
    order = np.argsort(counts - exact, kind="stable")
    while (left := rows - int(counts.sum())) > 0:
        free = order[counts[order] < tokens]
        counts[free[:left]] += 1
    return counts


def _one_expert(rng: np.random.Generator, tokens: int, num_experts: int, top_k: int) -> NDArray[np.int64]:
    counts = np.zeros(num_experts, np.int64)
    counts[np.sort(rng.permutation(num_experts)[:top_k])] = tokens
    return counts


@dataclass(frozen=True)
class _Distribution:
    """Exact `counts` of (generator, tokens, experts, top-k); or choices token by token: the top-k of `prior` [experts],
    of (generator, experts, top-k), plus `noise` [tokens, experts], of (generator, shape). All of them also take the
    values of `parameters`: name, default, least, most."""

    parameters: tuple[tuple[str, float, float, float], ...] = ()
    counts: Callable[..., NDArray[np.int64]] | None = None
    prior: Callable[..., NDArray[np.float64]] = lambda rng, experts, top_k: np.zeros(experts)
    noise: Callable[..., NDArray[np.float64]] = lambda rng, shape, *args: rng.gumbel(size=shape)


_DISTRIBUTIONS = {
    "balanced": _Distribution(counts=_balanced),
    "uniform": _Distribution(),
    "uneven": _Distribution((("d", 0.15, 0.0, 1.0),), counts=_uneven),
    "zipf": _Distribution(
        (("s", 1.0, 0.0, 10.0),), prior=lambda rng, experts, top_k, s: -s * np.log(rng.permutation(experts) + 1)
    ),
    "skewed": _Distribution(
        (("s", 1.0, 0.0, 10.0), ("sigma", 0.5, 0.0, 100.0)),
        prior=lambda rng, experts, top_k, s, sigma: -s * np.log(np.arange(1, experts + 1)),
        noise=lambda rng, shape, s, sigma: sigma * rng.standard_normal(shape),
    ),
    "one-expert": _Distribution(counts=_one_expert),
    "half-empty": _Distribution(
        prior=lambda rng, experts, top_k: np.where(
            rng.permutation(experts) < max((experts + 1) // 2, top_k), 0.0, -np.inf
        )
    ),
}
