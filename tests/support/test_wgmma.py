"""The check of a wgmma's registers, on machine code written for it."""

import pytest

from tests.support.wgmma import overwritten

PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, R100, gdesc[UR8], R24, gsb0"
OTHER = "HGMMA.64x128x16.F32.BF16 R24, R108, gdesc[UR8], R24, gsb0"
WAIT, WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
WRITE = "LDS.128 R100, [R4]"


def listing(*code: str) -> str:
    return "".join(f"        /*{16 * i:04x}*/                   {text} ;   /* 0x0 */\n" for i, text in enumerate(code))


RIGHT = {
    "waited for": (PRODUCT, WAIT, WRITE, "EXIT"),
    "another register": (PRODUCT, "LDS.128 R104, [R4]", WAIT, "EXIT"),
    "read, not written": (PRODUCT, "STS.128 [R4], R100", WAIT, "EXIT"),
    "waited for, but for a later one": (PRODUCT, OTHER, WAIT_BUT_ONE, WRITE, WAIT, "EXIT"),
    "an operand in shared memory": ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0", WRITE, WAIT, "EXIT"),
    "the loop waits": (WRITE, PRODUCT, WAIT, "@!P1 BRA 0x0", "EXIT"),
}
WRONG = {
    "at once": (PRODUCT, WRITE, WAIT, "EXIT"),
    "one of four": (PRODUCT, "IMAD.MOV.U32 R103, RZ, RZ, R5", WAIT, "EXIT"),
    "the last of a wide one": (PRODUCT, "LDSM.16.M88.4 R97, [R4]", WAIT, "EXIT"),
    "a wait for an earlier one": (OTHER, PRODUCT, WAIT_BUT_ONE, WRITE, WAIT, "EXIT"),
    "in the next round": (WRITE, PRODUCT, "@!P1 BRA 0x0", WAIT, "EXIT"),
    "on one of two ways": (PRODUCT, "@P0 BRA 0x30", WAIT, WRITE, WAIT, "EXIT"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    assert overwritten(listing(*RIGHT[name])) == []


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    assert overwritten(listing(*WRONG[name]))
