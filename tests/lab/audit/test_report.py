from expertile.device import Device
from expertile.lab.audit.context import Context
from expertile.lab.audit.document import parse
from expertile.lab.audit.report import Options, Report
from expertile.lab.audit.workload import Workload, nearby, remote


def _context(text: str, options: Options | None = None) -> Context:
    return Context(Report(parse(text), options or Options()))


def _work(text: str, **options: object) -> Workload | str:
    context = _context(text, Options(**options))  # type: ignore[arg-type]
    claim = next(c for c in context.claims if c.kind == "time")
    return nearby(context.report, claim.place)


def test_the_nearest_sizes_win():
    work = _work("# GEMM\n\nShape: 64x64x64\n\n| case | ms |\n|-|-|\n| 128x128x128 | 1.0 |\n")
    assert work.standard.flops == 2 * 128**3


def test_sizes_of_a_sibling_section_do_not_leak():
    text = "# GEMM\n\n## One\nShape: 64x64x64\n\n## Two\n\n| case | time (ms) |\n|-|-|\n| a | 1.0 |\n"
    assert isinstance(_work(text), str)


def test_a_table_column_completes_the_shape_of_its_section():
    text = (
        "# Layer norm\n\n- Shape: [32 × 512 × 768]\n- Precision: FP32\n\n| Hidden Dim | Triton (ms) |\n|-|-|\n| 256 "
        "| 1.0 |\n"
    )
    assert _work(text).standard.nbytes == 2 * 32 * 512 * 256 * 4


def test_a_header_that_names_the_sizes_of_a_shape():
    text = "# Matmul (M=128)\n\n| K×N | time (ms) |\n|-|-|\n| 8192×8192 | 0.12 |\n"
    assert _work(text).standard.flops == 2 * 128 * 8192**2


def test_far_configurations_join_commands_with_rows_and_prefer_the_reported_run():
    text = (
        "# MoE\n\n| impl | latency |\n|-|-|\n| a | 4.5 ms |\n| b | 9 ms |\n\n## Run\n\n```bash\n# quick\nrun.py "
        "--config x --batch 4 --seq 8\n"
        "# for the results\nrun.py --config x --batch 16 --seq 512\n```\n\n## Models\n\n"
        "| Config | Experts | Hidden | FFN | Top-K |\n|-|-|-|-|-|\n| x | 8 | 64 | 128 | 2 |\n| y | 4 | 8 | 8 | 1 |\n"
    )
    context = _context(text)
    claim = next(c for c in context.claims if c.kind == "time")
    assert isinstance(nearby(context.report, claim.place), str)
    (work,) = remote(context.report, claim.place)
    assert work.least_flops.flops == 2 * 16 * 512 * 2 * 64 * 128
    assert "line 14" in work.remote


def test_formats_that_tell_rows_apart_do_not_hold_for_the_others():
    text = "# MoE\n\nBF16: 2 bytes. INT4: 0.5 bytes.\n\n| impl | ms |\n|-|-|\n| plain | 2.0 |\n| INT4 | 1.0 |\n"
    report = _context(text).report
    assert report.formats(report.cell(0, 0, 1)) == ["bf16"]
    assert report.formats(report.cell(0, 1, 1)) == ["int4"]


def test_the_gpu_of_a_key_line_beats_others_that_are_mentioned():
    text = "# GEMM\n\n**Hardware**: NVIDIA GeForce RTX 3090\n\nThe blog used an H100.\n\nours: 3 ms\n"
    context = _context(text)
    known, _ = context.report.devices(context.claims[0].place)
    assert [d.name for d in known] == ["NVIDIA GeForce RTX 3090"]


def test_an_unknown_gpu_is_not_replaced_by_another_that_is_mentioned():
    context = _context("GPU: RTX 4060 Ti\n\nNot an H100.\n\nours: 3 ms\n")
    known, why = context.report.devices(context.claims[0].place)
    assert known == []
    assert "4060" in why


def test_options_say_what_the_text_leaves_out():
    h100 = Device.by_name("h100")
    context = _context("kernel: 3 ms\n", Options(("4096x4096x4096",), "bf16", h100))
    place = context.claims[0].place
    assert context.report.devices(place)[0] == [h100]
    assert context.report.formats(place) == ["bf16"]
    assert context.work(place).standard.flops == 2 * 4096**3


def test_gpu_counts_of_the_set_up_multiply_limits_and_idle_mentions_do_not():
    one = _context("# GEMM on H100\n\nours: 900 TFLOPS in fp16\n\nSome day we may use 8 GPUs.\n")
    assert one.report.gpus(one.claims[0].place) == 1
    many = _context("# GEMM\n\n- GPU: 8x H100\n\nours: 900 TFLOPS in fp16\n")
    assert many.report.gpus(many.claims[0].place) == 8


def test_m_n_and_k_are_a_matrix_product():
    context = _context("M=1024 N=64 K=32: 0.35 ms\n")
    assert context.report.operation(context.claims[0].place) == "gemm"
