"""The GPUs that can be named without being present: what their makers state of them.

Peaks are dense (no structured sparsity), with float32 accumulation where the hardware offers a choice, at the highest
clock the part may boost to. Sources: NVIDIA architecture whitepapers and datasheets (Volta 2017, Ampere GA100/GA102
2020, Ada 2022, Hopper 2022, Blackwell 2024 and RTX Blackwell 2025); per-SM rates from the CUDA C++ Programming Guide's
arithmetic-throughput table; AMD CDNA whitepapers and Instinct and Radeon data sheets (MI100 2020 to MI355X 2025).
"""

from collections.abc import Mapping

_Nvidia = tuple[str, tuple[int, int], int, float, int, float, float, float, Mapping[str, int], tuple[str, ...]]
_Amd = tuple[str, int, float, float, float, float, Mapping[str, float], tuple[str, ...]]


def _cdna(fp64: float, fp32: float, fp16: float, tf32: float = 0, fp8: float = 0, fp4: float = 0) -> dict[str, float]:
    found = {"fp64": fp64, "fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": fp16, "fp8": fp8, "fp4": fp4}
    return {key: value for key, value in {**found, "int8": fp8 or fp16}.items() if value}


def _rdna(fp32: float, fp16: float, fp8: float = 0) -> dict[str, float]:
    found = {"fp32": fp32, "fp16": fp16, "bf16": fp16, "fp8": fp8, "int8": fp8 or fp16}
    return {key: value for key, value in found.items() if value}


# FLOP per clock and SM, a multiply-add counted as two.
_KEPLER = {"fp64": 128, "fp32": 384}
_PASCAL = {"fp64": 8, "fp32": 256}
_VOLTA = {"fp64": 64, "fp32": 128, "fp16": 1024}
_TURING = {"fp64": 4, "fp32": 128, "fp16": 1024, "int8": 2048}
_TU_GEFORCE = {**_TURING, "fp16": 512}
_GA100 = {"fp64": 128, "fp32": 128, "tf32": 1024, "fp16": 2048, "bf16": 2048, "int8": 4096}
_GA102 = {"fp64": 4, "fp32": 256, "tf32": 256, "fp16": 512, "bf16": 512, "int8": 2048}
_GA_PRO = {**_GA102, "tf32": 512, "fp16": 1024, "bf16": 1024}
_AD102 = {"fp64": 4, "fp32": 256, "tf32": 256, "fp16": 512, "bf16": 512, "fp8": 1024, "int8": 2048}
_L40S = {"fp64": 4, "fp32": 256, "tf32": 512, "fp16": 1024, "bf16": 1024, "fp8": 2048, "int8": 2048}
_HOPPER = {"fp64": 256, "fp32": 256, "tf32": 2048, "fp16": 4096, "bf16": 4096, "fp8": 8192, "int8": 8192}
_B200 = {"fp64": 128, "fp32": 256, "tf32": 4096, "fp16": 8192, "bf16": 8192, "fp8": 16384, "fp4": 32768, "int8": 16384}
_B300 = {**_B200, "fp64": 4, "fp4": 52000, "int8": 1024}
_GB202 = {**_AD102, "fp4": 4096}
_GB_PRO = {**_L40S, "fp4": 4096}

# Name, compute capability, SMs, GHz, KiB of shared memory of a block, MiB of L2, GB and TB/s of memory, rates, aliases.
# GeForce parts run float32-accumulated tensor products at half rate; the whitepapers' higher figures
# (142 TFLOP/s fp16 on the 3090, 330 on the 4090) accumulate in float16. See `generous_peak`.
# fmt: off
NVIDIA: tuple[_Nvidia, ...] = (
    ("NVIDIA H200", (9, 0), 132, 1.98, 227, 60, 141, 4.8, _HOPPER, ("h200", "h200 sxm")),
    ("NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 227, 50, 80, 3.35, _HOPPER, ("h100 sxm", "h100 sxm5", "h100", "h100 80gb", "h100 sxm 80gb", "h100 sxm5 80gb", "h100 80gb sxm", "h100 80gb sxm5")),
    ("NVIDIA H100 PCIe", (9, 0), 114, 1.755, 227, 50, 80, 2.04, _HOPPER, ("h100 pcie", "h100 80gb pcie", "h100 pcie 80gb")),
    ("NVIDIA H100 NVL", (9, 0), 132, 1.785, 227, 50, 94, 3.938, _HOPPER, ("h100 nvl",)),
    ("NVIDIA H800", (9, 0), 132, 1.98, 227, 50, 80, 3.35, _HOPPER, ("h800",)),
    ("NVIDIA H20", (9, 0), 78, 1.98, 227, 60, 96, 4.0, {**{k: v // 4 for k, v in _HOPPER.items()}, "fp32": 256}, ("h20",)),
    ("NVIDIA GH200", (9, 0), 132, 1.98, 227, 60, 96, 4.0, _HOPPER, ("gh200",)),
    ("NVIDIA B200", (10, 0), 148, 1.965, 227, 126, 180, 8.0, _B200, ("b200",)),
    ("NVIDIA GB200", (10, 0), 152, 1.965, 227, 126, 186, 8.0, _B200, ("gb200",)),
    ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 163, 40, 80, 2.039, _GA100, ("a100 80gb", "80gb a100", "a100 sxm4 80gb", "a100 sxm 80gb", "a100 80gb sxm", "a100 80gb sxm4", "a100", "a100 sxm", "a100 sxm4")),
    ("NVIDIA A100-SXM4-40GB", (8, 0), 108, 1.41, 163, 40, 40, 1.555, _GA100, ("a100 40gb", "40gb a100", "a100 sxm4 40gb", "a100 sxm 40gb", "a100 40gb sxm", "a100 40gb sxm4", "a100 pcie 40gb", "a100 40gb pcie")),
    ("NVIDIA A100 80GB PCIe", (8, 0), 108, 1.41, 163, 40, 80, 1.935, _GA100, ("a100 pcie 80gb", "a100 80gb pcie", "a100 pcie")),
    ("NVIDIA A800", (8, 0), 108, 1.41, 163, 40, 80, 2.039, _GA100, ("a800",)),
    ("NVIDIA A10", (8, 6), 72, 1.695, 99, 6, 24, 0.6, _GA_PRO, ("a10", "a10g")),
    ("NVIDIA A40", (8, 6), 84, 1.74, 99, 6, 48, 0.696, _GA_PRO, ("a40",)),
    ("NVIDIA RTX A6000", (8, 6), 84, 1.8, 99, 6, 48, 0.768, _GA_PRO, ("a6000", "rtx a6000")),
    ("NVIDIA GeForce RTX 3060", (8, 6), 28, 1.777, 99, 3, 12, 0.36, _GA102, ("rtx 3060",)),
    ("NVIDIA GeForce RTX 3070", (8, 6), 46, 1.725, 99, 4, 8, 0.448, _GA102, ("rtx 3070",)),
    ("NVIDIA GeForce RTX 3080", (8, 6), 68, 1.71, 99, 5, 10, 0.76, _GA102, ("rtx 3080",)),
    ("NVIDIA GeForce RTX 3090", (8, 6), 82, 1.695, 99, 6, 24, 0.936, _GA102, ("rtx 3090",)),
    ("NVIDIA GeForce RTX 3090 Ti", (8, 6), 84, 1.86, 99, 6, 24, 1.008, _GA102, ("rtx 3090 ti", "3090 ti")),
    ("NVIDIA GeForce RTX 4060", (8, 9), 24, 2.46, 99, 24, 8, 0.272, _AD102, ("rtx 4060",)),
    ("NVIDIA GeForce RTX 4070", (8, 9), 46, 2.475, 99, 36, 12, 0.504, _AD102, ("rtx 4070",)),
    ("NVIDIA GeForce RTX 4080", (8, 9), 76, 2.505, 99, 64, 16, 0.717, _AD102, ("rtx 4080",)),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52, 99, 72, 24, 1.008, _AD102, ("rtx 4090",)),
    ("NVIDIA L4", (8, 9), 58, 2.04, 99, 48, 24, 0.3, _L40S, ("l4",)),
    ("NVIDIA L40S", (8, 9), 142, 2.52, 99, 96, 48, 0.864, _L40S, ("l40s",)),
    ("NVIDIA L40", (8, 9), 142, 2.49, 99, 96, 48, 0.864, _AD102, ("l40",)),
    ("NVIDIA L20", (8, 9), 92, 2.52, 99, 96, 48, 0.864, _AD102, ("l20",)),
    ("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, 2.505, 99, 96, 48, 0.96, _L40S, ("rtx 6000 ada", "6000 ada", "a6000 ada", "rtx a6000 ada")),
    ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407, 99, 96, 32, 1.792, _GB202, ("rtx 5090",)),
    ("Tesla V100-SXM2-32GB", (7, 0), 80, 1.53, 96, 6, 32, 0.9, _VOLTA, ("v100 sxm2", "v100 sxm2 32gb", "v100", "v100 sxm2 16gb")),
    ("Tesla V100-PCIE-16GB", (7, 0), 80, 1.38, 96, 6, 16, 0.9, _VOLTA, ("v100 pcie",)),
    ("Tesla T4", (7, 5), 40, 1.59, 64, 4, 16, 0.32, _TURING, ("t4", "tesla t4", "nvidia t4")),
    ("NVIDIA GeForce RTX 2080 Ti", (7, 5), 68, 1.545, 64, 5.5, 11, 0.616, _TU_GEFORCE, ("rtx 2080 ti", "2080 ti")),
    ("Tesla P100-PCIE-16GB", (6, 0), 56, 1.328, 48, 4, 16, 0.732, {"fp64": 64, "fp32": 128, "fp16": 256}, ("p100", "p100 pcie")),
    ("NVIDIA H200 NVL", (9, 0), 132, 1.785, 227, 60, 141, 4.8, _HOPPER, ("h200 nvl",)),
    ("NVIDIA GH200 144G HBM3e", (9, 0), 132, 1.98, 227, 60, 144, 4.9, _HOPPER, ("gh200 144g", "gh200 144gb")),
    ("NVIDIA B300", (10, 3), 148, 1.965, 227, 126, 288, 8.0, _B300, ("b300",)),
    ("NVIDIA GB300", (10, 3), 152, 1.965, 227, 126, 288, 8.0, _B300, ("gb300",)),
    ("NVIDIA GB10", (12, 1), 48, 2.5, 99, 24, 128, 0.273, _GB_PRO, ("gb10", "dgx spark")),
    ("NVIDIA A30", (8, 0), 56, 1.44, 163, 24, 24, 0.933, _GA100, ("a30",)),
    ("NVIDIA A2", (8, 6), 10, 1.77, 99, 2, 16, 0.2, _GA_PRO, ("nvidia a2", "a2 gpu")),
    ("NVIDIA RTX A2000", (8, 6), 26, 1.2, 99, 6, 12, 0.288, _GA_PRO, ("a2000", "rtx a2000")),
    ("NVIDIA RTX A4000", (8, 6), 48, 1.56, 99, 6, 16, 0.448, _GA_PRO, ("a4000", "rtx a4000")),
    ("NVIDIA RTX A4500", (8, 6), 56, 1.65, 99, 6, 20, 0.64, _GA_PRO, ("a4500", "rtx a4500")),
    ("NVIDIA RTX A5000", (8, 6), 64, 1.695, 99, 6, 24, 0.768, _GA_PRO, ("a5000", "rtx a5000")),
    ("NVIDIA RTX A5500", (8, 6), 80, 1.665, 99, 6, 24, 0.768, _GA_PRO, ("a5500", "rtx a5500")),
    ("NVIDIA GeForce RTX 3050", (8, 6), 20, 1.777, 99, 6, 8, 0.224, _GA102, ("rtx 3050",)),
    ("NVIDIA GeForce RTX 3060 Ti", (8, 6), 38, 1.665, 99, 6, 8, 0.448, _GA102, ("rtx 3060 ti", "3060 ti")),
    ("NVIDIA GeForce RTX 3070 Ti", (8, 6), 48, 1.77, 99, 6, 8, 0.608, _GA102, ("rtx 3070 ti", "3070 ti")),
    ("NVIDIA GeForce RTX 3080 12GB", (8, 6), 70, 1.71, 99, 6, 12, 0.912, _GA102, ("rtx 3080 12gb",)),
    ("NVIDIA GeForce RTX 3080 Ti", (8, 6), 80, 1.665, 99, 6, 12, 0.912, _GA102, ("rtx 3080 ti", "3080 ti")),
    ("NVIDIA GeForce RTX 3060 Laptop GPU", (8, 6), 30, 1.703, 99, 6, 6, 0.336, _GA102, ("rtx 3060 laptop gpu", "rtx 3060 laptop")),
    ("NVIDIA GeForce RTX 3070 Laptop GPU", (8, 6), 40, 1.62, 99, 6, 8, 0.448, _GA102, ("rtx 3070 laptop gpu", "rtx 3070 laptop")),
    ("NVIDIA GeForce RTX 3080 Laptop GPU", (8, 6), 48, 1.71, 99, 6, 16, 0.448, _GA102, ("rtx 3080 laptop gpu", "rtx 3080 laptop")),
    ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", (8, 6), 58, 1.59, 99, 6, 16, 0.512, _GA102, ("rtx 3080 ti laptop gpu", "rtx 3080 ti laptop")),
    ("NVIDIA GeForce RTX 4050 Laptop GPU", (8, 9), 20, 2.37, 99, 12, 6, 0.192, _AD102, ("rtx 4050 laptop gpu", "rtx 4050 laptop")),
    ("NVIDIA GeForce RTX 4060 Laptop GPU", (8, 9), 24, 2.37, 99, 32, 8, 0.256, _AD102, ("rtx 4060 laptop gpu", "rtx 4060 laptop")),
    ("NVIDIA GeForce RTX 4070 Laptop GPU", (8, 9), 36, 2.175, 99, 32, 8, 0.256, _AD102, ("rtx 4070 laptop gpu", "rtx 4070 laptop")),
    ("NVIDIA GeForce RTX 4080 Laptop GPU", (8, 9), 58, 2.28, 99, 48, 12, 0.432, _AD102, ("rtx 4080 laptop gpu", "rtx 4080 laptop")),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9), 76, 2.04, 99, 64, 16, 0.576, _AD102, ("rtx 4090 laptop gpu", "rtx 4090 laptop")),
    ("NVIDIA GeForce RTX 4060 Ti", (8, 9), 34, 2.535, 99, 32, 16, 0.288, _AD102, ("rtx 4060 ti", "4060 ti")),
    ("NVIDIA GeForce RTX 4070 SUPER", (8, 9), 56, 2.475, 99, 48, 12, 0.504, _AD102, ("rtx 4070 super", "4070 super")),
    ("NVIDIA GeForce RTX 4070 Ti", (8, 9), 60, 2.61, 99, 48, 12, 0.504, _AD102, ("rtx 4070 ti", "4070 ti")),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", (8, 9), 66, 2.61, 99, 48, 16, 0.672, _AD102, ("rtx 4070 ti super", "4070 ti super")),
    ("NVIDIA GeForce RTX 4080 SUPER", (8, 9), 80, 2.55, 99, 64, 16, 0.736, _AD102, ("rtx 4080 super", "4080 super")),
    ("NVIDIA GeForce RTX 4090 D", (8, 9), 114, 2.52, 99, 72, 24, 1.008, _AD102, ("rtx 4090 d",)),
    ("NVIDIA RTX 4000 Ada Generation", (8, 9), 48, 2.175, 99, 48, 20, 0.36, _L40S, ("rtx 4000 ada",)),
    ("NVIDIA RTX 5000 Ada Generation", (8, 9), 100, 2.55, 99, 72, 32, 0.576, _L40S, ("rtx 5000 ada",)),
    ("NVIDIA GeForce RTX 5060", (12, 0), 30, 2.497, 99, 32, 8, 0.448, _GB202, ("rtx 5060",)),
    ("NVIDIA GeForce RTX 5060 Ti", (12, 0), 36, 2.572, 99, 32, 16, 0.448, _GB202, ("rtx 5060 ti",)),
    ("NVIDIA GeForce RTX 5070", (12, 0), 48, 2.512, 99, 48, 12, 0.672, _GB202, ("rtx 5070",)),
    ("NVIDIA GeForce RTX 5070 Ti", (12, 0), 70, 2.452, 99, 48, 16, 0.896, _GB202, ("rtx 5070 ti",)),
    ("NVIDIA GeForce RTX 5080", (12, 0), 84, 2.617, 99, 64, 16, 0.96, _GB202, ("rtx 5080",)),
    ("NVIDIA GeForce RTX 5090 Laptop GPU", (12, 0), 82, 2.16, 99, 64, 24, 0.896, _GB202, ("rtx 5090 laptop gpu", "rtx 5090 laptop")),
    ("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 2.617, 99, 128, 96, 1.792, _GB_PRO, ("rtx pro 6000", "pro 6000 blackwell")),
    ("Tesla V100S-PCIE-32GB", (7, 0), 80, 1.597, 96, 6, 32, 1.134, _VOLTA, ("v100s",)),
    ("NVIDIA TITAN V", (7, 0), 80, 1.455, 96, 4.5, 12, 0.653, _VOLTA, ("titan v",)),
    ("NVIDIA TITAN RTX", (7, 5), 72, 1.77, 64, 6, 24, 0.672, _TURING, ("titan rtx",)),
    ("Quadro RTX 6000", (7, 5), 72, 1.77, 64, 6, 24, 0.672, _TURING, ("quadro rtx 6000",)),
    ("Quadro RTX 8000", (7, 5), 72, 1.77, 64, 6, 48, 0.672, _TURING, ("quadro rtx 8000", "rtx 8000")),
    ("NVIDIA GeForce RTX 2060", (7, 5), 30, 1.68, 64, 4, 6, 0.336, _TU_GEFORCE, ("rtx 2060",)),
    ("NVIDIA GeForce RTX 2060 SUPER", (7, 5), 34, 1.65, 64, 4, 8, 0.448, _TU_GEFORCE, ("rtx 2060 super",)),
    ("NVIDIA GeForce RTX 2070", (7, 5), 36, 1.62, 64, 4, 8, 0.448, _TU_GEFORCE, ("rtx 2070",)),
    ("NVIDIA GeForce RTX 2070 SUPER", (7, 5), 40, 1.77, 64, 4, 8, 0.448, _TU_GEFORCE, ("rtx 2070 super",)),
    ("NVIDIA GeForce RTX 2080", (7, 5), 46, 1.71, 64, 4, 8, 0.448, _TU_GEFORCE, ("rtx 2080",)),
    ("NVIDIA GeForce RTX 2080 SUPER", (7, 5), 48, 1.815, 64, 4, 8, 0.496, _TU_GEFORCE, ("rtx 2080 super",)),
    ("NVIDIA GeForce GTX 1650", (7, 5), 14, 1.665, 64, 1, 4, 0.128, {"fp64": 4, "fp32": 128, "fp16": 256}, ("gtx 1650",)),
    ("NVIDIA GeForce GTX 1660 Ti", (7, 5), 24, 1.77, 64, 1.5, 6, 0.288, {"fp64": 4, "fp32": 128, "fp16": 256}, ("gtx 1660 ti",)),
    ("Tesla P100-SXM2-16GB", (6, 0), 56, 1.48, 48, 4, 16, 0.732, {"fp64": 64, "fp32": 128, "fp16": 256}, ("p100 sxm2",)),
    ("Tesla P40", (6, 1), 30, 1.531, 48, 3, 24, 0.347, {**_PASCAL, "int8": 1024}, ("p40",)),
    ("Tesla P4", (6, 1), 20, 1.114, 48, 2, 8, 0.192, {**_PASCAL, "int8": 1024}, ("tesla p4",)),
    ("NVIDIA TITAN Xp", (6, 1), 30, 1.582, 48, 3, 12, 0.548, _PASCAL, ("titan xp",)),
    ("NVIDIA TITAN X (Pascal)", (6, 1), 28, 1.531, 48, 3, 12, 0.48, _PASCAL, ("titan x", "pascal titan x", "titan x pascal")),
    ("NVIDIA GeForce GTX 1060", (6, 1), 10, 1.708, 48, 2, 6, 0.192, _PASCAL, ("gtx 1060",)),
    ("NVIDIA GeForce GTX 1070", (6, 1), 15, 1.683, 48, 2, 8, 0.256, _PASCAL, ("gtx 1070",)),
    ("NVIDIA GeForce GTX 1080", (6, 1), 20, 1.733, 48, 2, 8, 0.32, _PASCAL, ("gtx 1080",)),
    ("NVIDIA GeForce GTX 1080 Ti", (6, 1), 28, 1.582, 48, 2, 11, 0.484, _PASCAL, ("gtx 1080 ti", "1080 ti")),
    ("NVIDIA GeForce GTX 980", (5, 2), 16, 1.216, 48, 2, 4, 0.224, _PASCAL, ("gtx 980",)),
    ("NVIDIA GeForce GTX TITAN X", (5, 2), 24, 1.075, 48, 3, 12, 0.337, _PASCAL, ("gtx titan x", "maxwell titan x", "titan x maxwell")),
    ("Tesla M40", (5, 2), 24, 1.112, 48, 3, 24, 0.288, _PASCAL, ("tesla m40",)),
    ("Tesla K80", (3, 7), 13, 0.875, 48, 1.5, 12, 0.24, _KEPLER, ("k80",)),
    ("Tesla K40", (3, 5), 15, 0.875, 48, 1.5, 12, 0.288, _KEPLER, ("k40", "k40m")),
    ("NVIDIA Jetson AGX Orin", (8, 7), 16, 1.3, 163, 4, 64, 0.2048, {**_GA100, "fp64": 4, "fp32": 256}, ("agx orin", "jetson orin", "jetson agx orin")),
)

# Name, compute units, GHz, MiB of the last cache, GB and TB/s of memory, TFLOP/s, aliases.
AMD: tuple[_Amd, ...] = (
    ("AMD Instinct MI50", 60, 1.725, 4, 32, 1.024, {"fp64": 6.6, "fp32": 13.3, "fp16": 26.5}, ("mi50",)),
    ("AMD Instinct MI60", 64, 1.8, 4, 32, 1.024, {"fp64": 7.4, "fp32": 14.7, "fp16": 29.5}, ("mi60",)),
    ("AMD Instinct MI100", 120, 1.502, 8, 32, 1.229, {"fp64": 11.5, "fp32": 46.1, "fp16": 184.6, "bf16": 92.3, "int8": 184.6}, ("mi100",)),
    ("AMD Instinct MI210", 104, 1.7, 16, 64, 1.638, _cdna(45.3, 45.3, 181), ("mi210",)),
    ("AMD Instinct MI250", 208, 1.7, 16, 128, 3.277, _cdna(90.5, 90.5, 362.1), ("mi250",)),
    ("AMD Instinct MI250X", 220, 1.7, 16, 128, 3.277, _cdna(95.7, 95.7, 383), ("mi250x",)),
    ("AMD Instinct MI300A", 228, 2.1, 256, 128, 5.3, _cdna(122.6, 122.6, 980.6, 490.3, 1961.2), ("mi300a",)),
    ("AMD Instinct MI300X", 304, 2.1, 256, 192, 5.3, _cdna(163.4, 163.4, 1307.4, 653.7, 2614.9), ("mi300x", "mi300")),
    ("AMD Instinct MI325X", 304, 2.1, 256, 256, 6.0, _cdna(163.4, 163.4, 1307.4, 653.7, 2614.9), ("mi325x", "mi325")),
    ("AMD Instinct MI350X", 256, 2.2, 256, 288, 8.0, _cdna(72.1, 144.2, 2306.9, 0, 4613.7, 9227.5), ("mi350x", "mi350")),
    ("AMD Instinct MI355X", 256, 2.4, 256, 288, 8.0, _cdna(78.6, 157.3, 2516.6, 0, 5033.2, 10066.3), ("mi355x", "mi355")),
    ("AMD Radeon RX 6800 XT", 72, 2.25, 128, 16, 0.512, _rdna(20.7, 41.5), ("rx 6800 xt",)),
    ("AMD Radeon RX 6900 XT", 80, 2.25, 128, 16, 0.512, _rdna(23.0, 46.1), ("rx 6900 xt",)),
    ("AMD Radeon RX 7600", 32, 2.655, 32, 8, 0.288, _rdna(21.8, 43.5), ("rx 7600",)),
    ("AMD Radeon RX 7700 XT", 54, 2.544, 48, 12, 0.432, _rdna(35.2, 70.3), ("rx 7700 xt",)),
    ("AMD Radeon RX 7800 XT", 60, 2.43, 64, 16, 0.624, _rdna(37.3, 74.7), ("rx 7800 xt",)),
    ("AMD Radeon RX 7900 GRE", 80, 2.245, 64, 16, 0.576, _rdna(46.0, 91.9), ("rx 7900 gre", "7900 gre")),
    ("AMD Radeon RX 7900 XT", 84, 2.4, 80, 20, 0.8, _rdna(51.5, 103), ("rx 7900 xt", "7900 xt")),
    ("AMD Radeon RX 7900 XTX", 96, 2.5, 96, 24, 0.96, _rdna(61.4, 122.8), ("rx 7900 xtx", "7900 xtx")),
    ("AMD Radeon RX 9060 XT", 32, 3.13, 32, 16, 0.322, _rdna(25.6, 103, 205), ("rx 9060 xt",)),
    ("AMD Radeon RX 9070", 56, 2.52, 64, 16, 0.645, _rdna(36.1, 145, 289), ("rx 9070",)),
    ("AMD Radeon RX 9070 XT", 64, 2.97, 64, 16, 0.645, _rdna(48.7, 195, 389), ("rx 9070 xt",)),
    ("AMD Radeon PRO W7800", 70, 2.5, 64, 32, 0.576, _rdna(45.2, 90.5), ("w7800",)),
    ("AMD Radeon PRO W7900", 96, 2.5, 96, 48, 0.864, _rdna(61.3, 122.6), ("w7900",)),
    ("AMD Radeon AI PRO R9700", 64, 2.92, 64, 32, 0.645, _rdna(47.8, 191, 383), ("r9700", "ai pro r9700")),
    ("AMD Radeon 8060S", 40, 2.9, 32, 128, 0.256, _rdna(29.7, 59.4), ("8060s", "strix halo", "ryzen ai max 395", "ai max 395")),
)
# fmt: on
