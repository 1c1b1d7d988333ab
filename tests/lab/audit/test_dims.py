import pytest

from expertile.lab.audit.dims import dim_name, dims_in, named_sizes, power_of_two, shapes_in


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("- Num Experts: 8", {"groups": 8}),
        ("Hidden Dim: 4,096", {"hidden": 4096}),
        ("[batch=4, heads=8, seq_len=1024, head_dim=64]", {"batch": 4, "heads": 8, "seq": 1024, "head_dim": 64}),
        ("B=4 H=8 S=1024 D=64", {"batch": 4, "heads": 8, "seq": 1024, "head_dim": 64}),
        ("run.py --config big --batch 16 --seq 512", {"batch": 16, "seq": 512}),
        ("M=N=K=4096", {"m": 4096, "n": 4096, "k": 4096}),
        ("E=8, m=512, N=4096", {"groups": 8, "m": 512, "n": 4096}),
        ("batch size 4, seq length 2048, top-2", {"batch": 4, "seq": 2048, "topk": 2}),
        ("16384 tokens, 8 experts", {"tokens": 16384, "groups": 8}),
        ("seq_len: 8k", {"seq": 8192}),
        ("Matrix size: 4096×4096", {}),
        ("speed: 3.5", {}),
    ],
)
def test_named_dimensions(text, dims):
    assert dims_in(text) == dims


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("16384x4096x14336", [((16384, 4096, 14336), 1)]),
        ("8 GEMMs (1024×1024)", [((1024, 1024), 8)]),
        ("64 GEMMs of 256×256", [((256, 256), 64)]),
        ("FP16 matmul (2048×2048)", [((2048, 2048), 1)]),
        ("8 × 1024³", [((1024, 1024, 1024), 8)]),
        ("torch.Size([16384, 768])", [((16384, 768), 1)]),
        ("(4096, 512) @ (512, 256)", [((4096, 512), 1), ((512, 256), 1)]),
        ("8192^2", [((8192, 8192), 1)]),
        ("128x128 tiles", []),
        ("block 64x64", []),
        ("24 × 0.170ms", []),
        ("Mixtral-8x7B", []),
    ],
)
def test_shapes(text, shapes):
    assert [(s.sizes, s.count) for s in shapes_in(text)] == shapes


def test_headers_name_dimensions():
    assert dim_name("Hidden Dim (H)") == "hidden"
    assert dim_name("speed") is None
    assert named_sizes("K×N", "4096×11008") == {"k": 4096, "n": 11008}
    assert named_sizes("Shape (M, N, K)", "1 x 2 x 3") == {"m": 1, "n": 2, "k": 3}
    assert named_sizes("Shape", "4096×11008") == {}


def test_powers_of_two():
    assert power_of_two("N = 2^30") == 2**30
    assert power_of_two("N = 30") is None
