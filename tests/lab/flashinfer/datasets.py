"""Folders in flashinfer-bench's format, with tiny axes."""

import json
from uuid import NAMESPACE_OID, uuid5

import torch
from safetensors.torch import save_file

GEMM = "import torch\n\ndef run(A, B):\n    return torch.matmul(A, B.transpose(-2, -1))\n"
BATCHED = "import torch\n\ndef run(A, B):\n    return torch.matmul(A, B)\n"
# Written for these tests; in float32 all the way, as the references of the published definitions are.
MOE = """import torch


def wide(x, scales):
    for dim in (-2, -1):
        scales = scales.repeat_interleave(x.shape[dim] // scales.shape[dim], dim)
    return x.float() * scales


def run({inputs}):
    x = wide(hidden_states, hidden_states_scale.t())
    {route}
    out = torch.zeros_like(x)
    for e in range(gemm1_weights.shape[0]):
        token, choice = (ids == e + {offset}).nonzero(as_tuple=True)
        up, gate = (x[token] @ wide(gemm1_weights[e], gemm1_weights_scale[e]).t()).chunk(2, 1)
        y = (gate * torch.sigmoid(gate) * up) @ wide(gemm2_weights[e], gemm2_weights_scale[e]).t()
        out.index_add_(0, token, y * weights[token, choice, None])
    return {out}
"""
SOFTMAX = "best, ids = routing_logits.float().topk({k}, 1); weights = torch.softmax(best, 1)"
SIGMOID = """s = torch.sigmoid(routing_logits)
    choice = s + routing_bias.float()
    best = choice.unflatten(1, ({ng}, -1)).topk(2, 2).values.sum(2).topk({kg}, 1).indices
    kept = torch.zeros(len(s), {ng}).scatter(1, best, 1.0).bool().repeat_interleave(s.shape[1] // {ng}, 1)
    ids = choice.masked_fill(~kept, -1e9).topk({k}, 1).indices
    weights = s.gather(1, ids); weights = routed_scaling_factor * weights / weights.sum(1, keepdim=True)"""


def spec(shape, dtype):
    return {"shape": shape.split() if shape is not None else None, "dtype": dtype}


def definition(name, op_type, axes, inputs, outputs, reference):
    kinds = {axis: {"type": "var"} if n is None else {"type": "const", "value": n} for axis, n in axes.items()}
    both = ({key: spec(*value) for key, value in of.items()} for of in (inputs, outputs))
    return dict(zip(("name", "op_type", "axes", "inputs", "outputs", "reference"),
                    (name, op_type, kinds, *both, reference), strict=True))  # fmt: skip


def gemm(name="gemm_n24_k64", op_type="gemm", dtype="float16", reference=GEMM):
    tensors = {"A": ("M K", dtype), "B": ("N K", dtype)}
    return definition(name, op_type, {"M": None, "N": 24, "K": 64}, tensors, {"C": ("M N", dtype)}, reference)


def batched(dtype="bfloat16"):
    axes = {"G": None, "M": None, "N": 24, "K": 64}
    tensors = {"A": ("G M K", dtype), "B": ("G K N", dtype)}
    return definition("grouped_gemm_n24_k64", "grouped_gemm", axes, tensors, {"C": ("G M N", dtype)}, BATCHED)


def moe(name, experts, local=None, groups=None, k=4, said_k=None):
    """FP8, H = I = 128·2 and 128. `groups`: (of experts, kept) with DeepSeek-V3's routing; the softmax without.
    `said_k` is the top-k of the name, where that is to be another than the reference's."""
    local = local or experts
    axes = dict(T=None, E=experts, L=local, H=256, I=128, U=256, HB=2, IB=1, UB=2)
    tensors = {
        "routing_logits": ("T E", "float32" if groups else "bfloat16"),
        "routing_bias": ("E", "bfloat16"),
        "hidden_states": ("T H", "float8_e4m3fn"),
        "hidden_states_scale": ("HB T", "float32"),
        "gemm1_weights": ("L U H", "float8_e4m3fn"),
        "gemm1_weights_scale": ("L UB HB", "float32"),
        "gemm2_weights": ("L H I", "float8_e4m3fn"),
        "gemm2_weights_scale": ("L HB IB", "float32"),
        "local_expert_offset": (None, "int32"),
        "routed_scaling_factor": (None, "float32"),
    }
    if not groups:
        tensors = {key: value for key, value in tensors.items() if not key.startswith(("routing_b", "loc", "routed"))}
    route = SIGMOID.format(ng=groups[0], kg=groups[1], k=k) if groups else SOFTMAX.format(k=k)
    offset = "local_expert_offset" if groups else "0"
    reference = MOE.format(inputs=", ".join(tensors), route=route, offset=offset, out="out.bfloat16()")
    marks = f"_ng{groups[0]}_kg{groups[1]}" if groups else ""
    name = f"{name}_topk{said_k or k}{marks}_e{local}"
    return definition(name, "moe", axes, tensors, {"output": ("T H", "bfloat16")}, reference)


def add(root, data, *workloads):
    """Write a definition and its workloads: (axes, inputs that are not random); tensors among those go to a file."""
    path = root / "definitions" / data["op_type"] / f"{data['name']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    lines = []
    for index, (axes, given) in enumerate(workloads):
        inputs = {key: {"type": "random"} for key in data["inputs"]}
        for key, value in given.items():
            if isinstance(value, torch.Tensor):
                blob = f"blob/{data['name']}-{index}-{key}.safetensors"
                (root / "blob").mkdir(exist_ok=True)
                save_file({"x": value}, root / blob)
                inputs[key] = {"type": "safetensors", "path": f"./{blob}", "tensor_key": "x"}
            else:
                inputs[key] = {"type": "scalar", "value": value}
        uuid = str(uuid5(NAMESPACE_OID, f"{data['name']}{index}"))
        work = {"uuid": uuid, "axes": axes, "inputs": inputs}
        lines.append(json.dumps({"definition": data["name"], "workload": work, "solution": None, "evaluation": None}))
    path = root / "workloads" / data["op_type"] / f"{data['name']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return data["name"]
