from expertile.lab.audit.columns import understand
from expertile.lab.audit.configs import remote_configs
from expertile.lab.audit.document import parse


def _configs(text: str, shapes: tuple[str, ...] = ()):
    document = parse(text)
    return remote_configs(document, [understand(t) for t in document.tables], shapes)


TABLE = "| Config | Experts | Hidden |\n|-|-|-|\n| a | 8 | 64 |\n| b | 4 | 32 |\n"


def test_rows_alone():
    assert [c.dims for c in _configs(TABLE)] == [{"groups": 8, "hidden": 64}, {"groups": 4, "hidden": 32}]


def test_a_command_without_a_row_is_joined_with_every_row():
    found = _configs(f"{TABLE}\n```bash\nrun.py --batch 4\n```\n")
    assert [c.dims["groups"] for c in found] == [8, 4]
    assert all(c.dims["batch"] == 4 for c in found)


def test_a_given_shape_excludes_the_others():
    (config,) = _configs(TABLE, ("M=1,N=2,K=3",))
    assert config.dims == {"m": 1, "n": 2, "k": 3}
    assert config.preferred
