from expertile.lab.audit.texttable import find


def _numbered(text: str) -> list[tuple[int, str]]:
    return list(enumerate(text.strip("\n").split("\n"), 1))


def test_aligned_columns_with_a_row_index():
    grids, _ = find(
        _numbered(
            "softmax-performance:\n       N    Triton     Torch\n0  256.0  480.53    700.1\n1  384.0  614.40    810.5"
        )
    )
    (grid,) = grids
    assert grid.header == ("", "N", "Triton", "Torch")
    assert grid.rows[1] == ("1", "384.0", "614.40", "810.5")
    assert grid.lines == (3, 4)
    assert grid.title == "softmax-performance:"


def test_boxes_and_pipes():
    (grid,), _ = find(_numbered("+---+----+\n| a | ms |\n+---+----+\n| x | 1  |\n| y | 2  |\n+---+----+"))
    assert grid.header == ("a", "ms")
    assert grid.rows == (("x", "1"), ("y", "2"))


def test_commas():
    (grid,), _ = find(_numbered("M,N,K,ms\n1,2,3,0.5\n4,5,6,0.7"))
    assert grid.header == ("M", "N", "K", "ms")


def test_key_value_lines_are_no_table():
    lines = _numbered("n=1,024 | PyTorch: 0.0152ms | Triton: 0.0104ms\nn=2,048 | PyTorch: 0.03ms | Triton: 0.02ms")
    grids, rest = find(lines)
    assert grids == []
    assert rest == lines
