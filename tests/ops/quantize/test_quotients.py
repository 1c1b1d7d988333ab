"""The quotients of the quantisers' kernels, worked out as they do it, for every significand there is.

With float64 in between, where products of float32 are exact, and a sum is rounded wrongly only if it lies within 2^-53
of a tie without being one."""

import pytest
import torch

BY_448 = torch.tensor(1.0) / 448


def fma(x, y, z):
    return (x.double() * y.double() + z.double()).float()


def corrected(q, x, s, inverse, steps):
    for _ in range(steps):
        q = fma(fma(q, -s, x), inverse, q)
    return q


def e4m3(x):
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def test_448ths_are_those_of_a_division():
    amax = 1 + torch.arange(2**23) / 2**23
    assert torch.equal(corrected(amax * BY_448, amax, torch.tensor(448.0), BY_448, 1), amax / 448)


def in_two_parts(s):
    high = 1 / s
    high = torch.where(fma(-s, high, torch.tensor(1.0)) < 0, torch.nextafter(high, torch.tensor(0.0)), high)
    return high, fma(-s, high, torch.tensor(1.0)) * high


@pytest.mark.parametrize("bits, rounded", [(8, 140), (11, 1045)], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("lift", [0, 127], ids=["ones", "the largest"])
def test_two_parts_of_a_reciprocal_decide_16_bit_inputs(bits, rounded, lift):
    """Every pair of significands of an element and of its block's largest; elements of e4m3's top two binades, and of
    all its subnormal ones. With the reciprocal rounded ties go the wrong way."""
    if lift and bits == 11:
        pytest.skip("float16 ends far below")
    significands = (1 + torch.arange(2 ** (bits - 1)) / 2 ** (bits - 1)) * 2.0**lift
    s = (significands / 448)[:, None]
    high, low = in_two_parts(s)
    assert (low >= 0).all()
    wrong = {"rounded": 0, "two parts": 0}
    for exponent in (0, 1, 14, 15, 16, 17, 18, 19):
        x = (significands * 2.0**-exponent)[None, :]
        inside = x <= significands[:, None]
        want = e4m3(x / s)
        for name, made in (("rounded", x * (1 / s)), ("two parts", fma(x, high, x * low))):
            wrong[name] += int(((e4m3(made) != want) & inside).sum())
    assert 0 < wrong["rounded"] <= rounded and wrong["two parts"] == 0, wrong


def test_two_corrections_are_the_division_of_float32():
    generator = torch.Generator().manual_seed(0)
    x, s = (1 + torch.randint(2**23, (2**20,), generator=generator) / 2**23 for _ in range(2))
    s[:1000] = 2 - 2.0**-23  # the significand whose reciprocal is hardest to round
    inverse = 1 / s
    assert not torch.equal(x * inverse, x / s)
    assert torch.equal(corrected(x * inverse, x, s, inverse, 2), x / s)
