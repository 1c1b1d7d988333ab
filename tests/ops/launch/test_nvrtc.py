"""What NVRTC compiles is kept, and compiled anew where anything of it differs."""

import ctypes
from types import SimpleNamespace

import pytest

from expertile.ops.launch import nvrtc


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """An NVRTC of one version; the list of what it has compiled, to `binary of …`."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    asked: list[tuple[str, tuple[str, ...]]] = []

    def compiled(_library, source, options):
        asked.append((source, options))
        return f"binary of {source}".encode()

    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda *_: 0))
    monkeypatch.setattr(nvrtc, "_compiled", compiled)
    return asked


def test_a_program_is_compiled_once(compiler):
    for _ in range(2):
        assert nvrtc.compiled("a") == b"binary of a"
        assert nvrtc.compiled("b") == b"binary of b"
    assert nvrtc.compiled("a", "--ftz=true") == b"binary of a"
    assert [(source, options[2:]) for source, options in compiler] == [("a", ()), ("b", ()), ("a", ("--ftz=true",))]


def test_another_version_compiles_again(compiler, monkeypatch):
    nvrtc.compiled("a")

    def newer(major, _minor):
        major._obj[0] = 14
        return 0

    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=newer))
    nvrtc.compiled("a")
    assert len(compiler) == 2


def test_a_program_with_an_error_is_not_kept(compiler, monkeypatch):
    def refused(*_):
        raise RuntimeError("NVRTC: expected a ';'")

    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_compiled", refused)
        with pytest.raises(RuntimeError, match="expected a ';'"):
            nvrtc.compiled("a")
    assert nvrtc.compiled("a") == b"binary of a"


def test_a_map_is_encoded_where_the_driver_wants_it(monkeypatch):
    """At a multiple of 64 bytes, with the contiguous dimension first; the map keeps its memory."""
    seen = []

    def encode(to, kind, rank, address, shape, pitches, box, steps, *_):
        seen.append((ctypes.addressof(to._obj) % 64, kind, address.value, *map(list, (shape, pitches, box, steps))))
        to._obj.opaque[15] = 7
        return 0

    monkeypatch.setattr(nvrtc, "_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=encode))
    maps = [nvrtc.tensor_map.__wrapped__(4096 * i, (5, 300, 64), (38400, 128), (1, 64, 64), 2) for i in range(99)]
    assert [m.opaque[15] for m in maps] == [7] * 99
    assert seen[1] == (0, 1, 4096, [64, 300, 5], [128, 38400], [64, 64, 1], [1, 1, 1])
    assert {at for at, *_ in seen} == {0}
