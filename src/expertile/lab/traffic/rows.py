"""Traffic of the row operators: softmax, layer norm and RMS norm over R rows of C elements, forward and backward.

N = R * C elements. Statistics of a row are float32 in the fused kernels and of the input's dtype in the unfused ones.
torch's kernels as of PyTorch 2.11: aten/src/ATen/native/cuda/SoftMax.cu, PersistentSoftmax.cuh, layer_norm_kernel.cu.
"""

from expertile.device import Device
from expertile.lab.race.operator import Workload
from expertile.lab.traffic.model import OURS, TORCH, UNFUSED, Formula, Step, Way
from expertile.ops.launch.device import Machine
from expertile.ops.rows import choose

_SOFTMAX_CU = "aten/src/ATen/native/cuda/SoftMax.cu"
_LAYER_NORM_CU = "aten/src/ATen/native/cuda/layer_norm_kernel.cu"
_STREAMED = "rows too long for the chip: read a second time, from L2 as far as it reaches"
_STATIC_SMEM = 48 * 1024  # cudaDeviceProp::sharedMemPerBlock of every GPU


def _machine(device: Device) -> Machine:
    return Machine(device.sm_count, device.at_least(9))


def _softmax(s: Workload, device: Device) -> tuple[Way, ...]:
    rows, cols, size = s["rows"], s["cols"], s.itemsize
    n, e, r = rows * cols, float(rows * cols * size), float(rows * size)
    unfused = Way(
        UNFUSED,
        (
            Step("max", e, r, n),
            Step("subtract", e + r, e, n),
            Step("exp", e, e, n),
            Step("sum", e, r, n),
            Step("divide", e + r, e, n),
        ),
        note="x.max, x - m, exp, sum, divide: five kernels",
    )
    kernel, again = _torch_softmax(cols, size)
    torch = Way(TORCH, (Step(kernel, e, e, 5 * n, again * e),), _SOFTMAX_CU)
    return unfused, torch, _ours(s, device, 1, 5 * n)


def _torch_softmax(cols: int, size: int) -> tuple[str, int]:
    """The kernel that `host_softmax` launches along a contiguous last dimension, and how often it rereads its input."""
    if cols <= 2048 and cols * size <= 8192:
        return "softmax_warp_forward", 0
    threads = min(-(-cols // 32) * 32, 1024)
    if -(-cols // threads) < 10:
        return "cunn_SoftMaxForwardReg", 0
    if cols % (16 // size) == 0 and cols < (_STATIC_SMEM - threads // 32 * 4) // size:
        return "cunn_SoftMaxForwardSmem", 0
    return "cunn_SoftMaxForward", 2


def _softmax_backward(s: Workload, device: Device) -> tuple[Way, ...]:
    rows, cols, size = s["rows"], s["cols"], s.itemsize
    n, e, r = rows * cols, float(rows * cols * size), float(rows * size)
    unfused = Way(
        UNFUSED,
        (
            Step("dy * y", 2 * e, e, n),
            Step("sum", e, r, n),
            Step("dy - sum", e + r, e, n),
            Step("times y", 2 * e, e, n),
        ),
    )
    kernel, again = _torch_softmax_backward(cols, size)
    torch = Way(
        TORCH,
        (Step("mul", 2 * e, e, n), Step(kernel, 2 * e, e, 3 * n, again * e)),
        _SOFTMAX_CU,
        "softmax_backward_cuda_out multiplies grad by output in a kernel of its own first",
    )
    return unfused, torch, _ours(s, device, 2, 4 * n)


def _torch_softmax_backward(cols: int, size: int) -> tuple[str, int]:
    if cols <= 1024 and cols * size <= 4096:
        return "softmax_warp_backward", 0
    threads = 32
    while threads < min(cols // (16 // size), 1024) / 2:
        threads *= 2
    if cols % (16 // size) == 0 and cols < (_STATIC_SMEM - threads // 32 * 4) // size:
        return "cunn_SoftMaxBackwardSmem", 0
    return "cunn_SoftMaxBackward", 1


def _ours(s: Workload, device: Device, inputs: int, flops: float, vectors: float = 0.0) -> Way:
    """One kernel, with so many inputs of R rows and so many bytes of vectors."""
    rows, cols, size = s["rows"], s["cols"], s.itemsize
    e, config = float(rows * cols * size), choose.forward(rows, cols, size, _machine(device))
    again, note = (inputs * e, _STREAMED) if config.streamed else (0.0, "")
    return Way(OURS, (Step(s.op, inputs * e + vectors, e, flops, again),), note=note)


def _norm(s: Workload, device: Device, centered: bool) -> tuple[Way, ...]:
    rows, cols, size = s["rows"], s["cols"], s.itemsize
    n, e, r, c = rows * cols, float(rows * cols * size), float(rows * size), float(cols * size)
    mean = (Step("mean", e, r, n), Step("x - mean", e + r, e, n)) if centered else ()
    shift = (Step("+ bias", e + c, e, n),) if centered else ()
    unfused = Way(
        UNFUSED,
        (
            *mean,
            Step("square", e, e, n),
            Step("mean of squares", e, r, n),
            Step("+ eps", r, r, rows),
            Step("rsqrt", r, r, rows),
            Step("times rstd", e + r, e, n),
            Step("times weight", e + c, e, n),
            *shift,
        ),
    )
    stats = 8.0 * rows if centered else 4.0 * rows
    flops, vectors = (8 if centered else 4) * n, 2 * c if centered else c
    steps: tuple[Step, ...]
    if cols % 4 == 0:
        steps = (Step("vectorized_layer_norm_kernel", e + vectors, e + stats, flops, e),)
        note = "each row is read for its statistics and again, from L1 or L2, for the result"
    else:
        steps = (
            Step("RowwiseMomentsCUDAKernel", e, stats, 4 * n),
            Step("LayerNormForwardCUDAKernel", e + stats + vectors, e, 4 * n),
        )
        note = "columns are no multiple of 4: two kernels"
    torch = Way(TORCH, steps, _LAYER_NORM_CU, note)
    return unfused, torch, _ours(s, device, 1, flops, vectors)


def _norm_backward(s: Workload, device: Device, centered: bool) -> tuple[Way, ...]:
    rows, cols, size = s["rows"], s["cols"], s.itemsize
    n, e, r, c = rows * cols, float(rows * cols * size), float(rows * size), float(cols * size)
    stats = 8.0 * rows if centered else 4.0 * rows
    grads = 2 * c if centered else c
    center = (Step("mean g", e, r, n), Step("g - mean", e + r, e, n)) if centered else ()
    bias = (Step("dbias = sum dy", e, c, n),) if centered else ()
    unfused = Way(
        UNFUSED,
        (
            Step("n = (h - mean) rstd" if centered else "n = h rstd", e + (2 * r if centered else r), e, 2 * n),
            Step("g = dy weight", e + c, e, n),
            Step("g n", 2 * e, e, n),
            Step("mean g n", e, r, n),
            Step("n times mean", e + r, e, n),
            *center,
            Step("subtract", 2 * e, e, n),
            Step("times rstd", e + r, e, n),
            Step("dy n", 2 * e, e, n),
            Step("dweight = sum", e, c, n),
            *bias,
        ),
    )
    sums: tuple[Step, ...]
    if rows > 64 * 1024 and cols // 32 < device.sm_count // 2:
        # One partial sum for every 32 rows, up to 32768 blocks in all.
        blocks = min(32768 // -(-cols // 32), -(-rows // 32))
        partial = blocks * grads
        sums = (
            Step("GammaBetaBackwardCUDAKernelTemplate", 2 * e + stats, partial, 4 * n),
            Step("sum over blocks", partial, grads, partial / size, launches=2 if centered else 1),
        )
    else:
        sums = (Step("GammaBetaBackwardCUDAKernelTemplate", 2 * e + stats, grads, 4 * n),)
    input_kernel = Step("layer_norm_grad_input_kernel", 2 * e + stats + c, e, (12 if centered else 7) * n, 2 * e)
    torch = Way(TORCH, (input_kernel, *sums), _LAYER_NORM_CU, "dy and x are read by two kernels, dx and the sums")
    return unfused, torch, _our_norm_backward(s, device, centered, stats, grads)


def _our_norm_backward(s: Workload, device: Device, centered: bool, stats: float, grads: float) -> Way:
    rows, cols, size = s["rows"], s["cols"], s.itemsize
    n, e, c = rows * cols, float(rows * cols * size), float(cols * size)
    config = choose.norm_backward(rows, cols, size, _machine(device))
    vectors = 2 if centered else 1
    flops = (15 if centered else 9) * n
    steps: tuple[Step, ...]
    if config.streamed:
        splits = max(1, min(-(-rows // 16), 4 * device.sm_count // -(-cols // 256)))
        partial = 4.0 * vectors * splits * cols
        steps = (
            Step("norm_backward_streamed", 2 * e + stats + c, e, (12 if centered else 7) * n, 2 * e),
            Step("norm_columns", 2 * e + stats, partial, 4 * n),
            Step("sum_partials", partial, grads, partial / 4),
        )
        return Way(OURS, steps, note=_STREAMED)
    partial = 4.0 * vectors * config.programs(rows, device.sm_count) * cols
    steps = (
        Step("norm_backward", 2 * e + stats + c, e + partial, flops),
        Step("sum_partials", partial, grads, partial / 4),
    )
    return Way(OURS, steps)


_DIMS = {"rows": 8192, "cols": 8192}

FORMULAS = (
    Formula("softmax", _DIMS, _softmax),
    Formula("softmax_backward", _DIMS, _softmax_backward),
    Formula("layer_norm", _DIMS, lambda s, d: _norm(s, d, True)),
    Formula("layer_norm_backward", _DIMS, lambda s, d: _norm_backward(s, d, True)),
    Formula("rms_norm", _DIMS, lambda s, d: _norm(s, d, False)),
    Formula("rms_norm_backward", _DIMS, lambda s, d: _norm_backward(s, d, False)),
)
