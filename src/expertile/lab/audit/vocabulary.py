"""The words of benchmark reports: operations, number formats, and the GPU a text names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from expertile.device import Device, find_in_text

# First match of a more special operation hides a more general one ("flash attention softmax" is attention).
_OPERATIONS: tuple[tuple[str, str], ...] = (
    ("unsupported", r"convolution|\bconv\d?d?\b|\bfft\b|sparse|\bspmm\b|\bsort|\bscan\b|stencil|laplacian|\bjacobi\b"
                    r"|linear attention|mamba|\bssm\b|sliding window|all-?reduce|all-?gather|all-?to-?all|nccl"
                    r"|cholesky"),
    ("attention", r"attention|\bsdpa\b|\bmha\b|\bgqa\b|\bmqa\b|\bfmha\b|flash-?attn|\bfa[123]\b"),
    ("softmax", r"softmax"),
    ("layer_norm", r"layer[ _-]?norm"),
    ("rms_norm", r"rms[ _-]?norm"),
    ("moe", r"\bmoe\b|mixture[- ]of[- ]experts"),
    ("grouped_gemm", r"group(?:ed)?[ _-]?gemm|grouped[ _-]?(?:mm|matmul|matrix)"),
    ("gemm", (
        r"gemm|\bgemv\b|mat[ _-]?mul|\bb?mm\b|matrix[ -](?:matrix "
        r")?(?:multipl|product)|\blinear\b|addmm|w\d+a\d+"
    )),
    ("vector_add", r"vector[ _-]?add|vec[ _-]?add|\baxpy\b|saxpy|elementwise add|element-wise add"),
    ("copy", r"\bcopy\b|memcpy|transpose"),
    ("reduction", r"\breduction\b|\breduce\b|\bsum reduction\b"),
    ("elementwise", r"element-?wise|\bgelu\b|\bsilu\b|\brelu\b|swiglu|geglu|\bdropout\b|\brope\b|pointwise"),
)  # fmt: skip
_OPERATION_PATTERNS = tuple((name, re.compile(pattern, re.I)) for name, pattern in _OPERATIONS)

# Bits of one value, and the pattern that names the format.
_FORMATS: tuple[tuple[str, float, str], ...] = (
    ("fp64", 64, r"fp64|float64|\bdouble\b|dgemm"),
    ("tf32", 32, r"tf32"),
    ("fp32", 32, r"fp32|float32|\bf32\b|single precision|\bsgemm\b"),
    ("bf16", 16, r"bf16|bfloat16"),
    ("fp16", 16, r"(?<!b)fp16|(?<!b)float16|(?<!b)\bf16\b|\bhalf\b(?= precision|\b-precision)|hgemm"),
    ("fp8", 8, r"fp8|float8|e4m3|e5m2|mxfp8"),
    ("int8", 8, r"int8|w8a8|\bi8\b|\bq8_0\b"),
    ("fp4", 4, r"(?:nv|mx)?fp4|e2m1"),
    ("int4", 4, r"int4|w4a\d+|\bnf4\b|\bq4_|\bawq\b|\bgptq\b|marlin"),
)
_FORMAT_PATTERNS = tuple((name, bits, re.compile(pattern, re.I)) for name, bits, pattern in _FORMATS)
_WIDTHS = (("fp32", 32, r"\b32-bit"), ("fp16", 16, r"\b16-bit"), ("int8", 8, r"\b8-bit"), ("int4", 4, r"\b4-bit"))
FORMAT_BITS = {name: bits for name, bits, _ in _FORMATS}

_GPU_LIKE = re.compile(
    r"\b(?:RTX|GTX|Quadro)\s?[A-Z]?\d{3,4}(?:\s?Ti|\s?Super)?\b|\bMI\d{3}X?\b|\b[AHLVTPB]\d{2,3}[A-Z]?\b"
    r"|\b[LT]4\b|\bTPU\b"
    r"|\bRadeon\b"
    r"|\bM[1-4] (?:Max|Pro|Ultra)\b|\bArc\b|\bGroq\b|\bLPU\b|\bCerebras\b|\bTrainium\d?\b|\bInferentia\d?\b"
    r"|\bJetson\b|\bGaudi\b|\bGB\d{3}\b|(?<![\d.,])(?<!\d )[2345]0[6789]0(?:\s?Ti)?(?![\w.,]?\d)(?!\s?(?:[x×*]|ms"
    r"|us|µs|μs|GB|MB|tokens))\b"
)
_VARIANT = re.compile(r"\b(?:NVL|Super|Ti|Mobile|Laptop|Max-?Q|96\s?GB)\b", re.I)


def operations(text: str) -> list[str]:
    """The operations that `text` names, most special first; a grouped product is not also a plain one."""
    found = [name for name, pattern in _OPERATION_PATTERNS if pattern.search(text)]
    if "grouped_gemm" in found or "moe" in found:
        found = [f for f in found if f != "gemm"]
    if "moe" in found:
        found = [f for f in found if f != "grouped_gemm"]
    if "attention" in found:
        found = [f for f in found if f not in ("softmax", "gemm")]
    return found


def formats(text: str) -> list[str]:
    """The number formats that `text` names, widest first: "bf16 in, fp32 out" gives ["fp32", "bf16"].

    A bare width ("16-bit") counts only if no format of that width is named.
    """
    found = [name for name, _, pattern in _FORMAT_PATTERNS if pattern.search(text)]
    widths = {FORMAT_BITS[name] for name in found}
    found += [name for name, bits, word in _WIDTHS if bits not in widths and re.search(word, text, re.I)]
    return sorted(found, key=lambda name: -FORMAT_BITS[name])


def device_key(name: str) -> str:
    """`name` as one of the formats known here. ValueError lists them."""
    found = formats(name)
    if not found:
        raise ValueError(f"dtype: expected one of {', '.join(FORMAT_BITS)}, got {name!r}")
    return found[-1]


def devices(text: str) -> tuple[list[Device], list[str]]:
    """(known GPUs that `text` names, names that look like a GPU but are not known).

    A variant that the table does not hold ("RTX 4080 Super") is unknown, never its slower or faster kin.
    """
    spaced = re.sub(r"\b(RTX|GTX)(?=\d)", r"\1 ", text, flags=re.I)
    spaced = re.sub(r"(?<=\d)(Ti|Super)\b", r" \1", spaced)
    spaced = re.sub(r"[-_](?=\d|SXM|PCIe|NVL)", " ", spaced)
    known: list[Device] = []
    unknown: list[str] = []
    for match in _GPU_LIKE.finditer(spaced):
        tail = re.match(r"[^,;|()\n]{0,14}", spaced[match.end() :])
        name = match[0] + (tail[0] if tail else "")
        found = find_in_text(name) or find_in_text(match[0])
        variant = _VARIANT.search(name)
        if not found or (variant and variant[0].lower() not in found[0].name.lower().replace("-", " ").split()):
            unknown.append(match[0].strip())
        elif found[0] not in known:
            known.append(found[0])
    return known, unknown


def gpu_count(texts: Iterable[str]) -> int:
    """The largest number of GPUs that any text says were used together ("8x H100", "TP=8", "4 GPUs"); 1 if none."""
    most = 1
    pattern = re.compile(
        r"(?<![\w.])(\d{1,4})\s?[x×*]\s?(?:NVIDIA\s)?(?:[AHBLV]\d{2,3}|RTX|GPU|MI\d)|(?<![\w.])(\d{1,4})[- "
        r"]GPUs?\b(?!-hour)"
        r"|\b(?:tp|ep|dp)[=: ]?\s?(\d{1,2})\b|\bpp\s?=\s?(\d{1,2})\b"
        r"|\b(?:tensor[- _]parallel(?:ism|[- _]size)?|world_?size|nproc[_-]per[_-]node|tp[_-]size)\s?[=: "
        r"]?\s?(\d{1,4})\b",
        re.I,
    )
    for text in texts:
        for match in pattern.finditer(text):
            most = max(most, *(int(g) for g in match.groups() if g))
    return most
