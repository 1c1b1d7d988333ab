"""A net under a rewrite: record the PTX of every kernel and config that the compile tier compiles, compare two trees.

    python tools/ptx_net.py record OUT.json [words for pytest: -n 2, -k gluon, a file]
    python tools/ptx_net.py compare OLD.json NEW.json

record   Runs the tests marked `compile` of the tree that this file stands in, and notes each compilation, those that
         Triton's cache answers too: the kernel, its arguments and options, and the hash of its PTX without what a moved
         line or a new name changes.
compare  Matches kernels by name, the rest by their hashes: a new name of a kernel or an argument is no difference.
         Tells kernels that are the same, changed, missing and new; "order alone" means that each line of PTX, whatever
         its registers, stands there as often as before. The exit status is 1 if kernels differ, 2 if the records cannot
         be compared.

Two records of the same Triton are comparable, no others. A record keeps where the PTX was, so that `diff` can go on.
"""

import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_PARTS = "EXPERTILE_PTX_NET"  # the folder that processes write their parts of a record to
_DEBUG = re.compile(r"\.section\s+\.debug_\w+\s*\{[^}]*\}")
_POSITION = re.compile(r"^\s*(?:\.loc\b|\.file\b|\.reg\s+\.\w+\s+%\w+<|\$L__(?:tmp|func_begin|func_end)\d+:).*$", re.M)
_FUNCTION = re.compile(r"(?<!extern )\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)")
_NUMBERED = re.compile(r"%[a-z]+\d+\b|\$L__BB\w+")
_NUMBER = re.compile(r"(%[a-z]+|\$L)\d+\b")


def canonical(ptx: str) -> str:
    """PTX without comments, source positions and debug sections; functions, registers and labels have the number of
    their first appearance."""
    ptx = _DEBUG.sub("", re.sub(r"//.*", "", ptx))
    ptx = _POSITION.sub("", ptx)
    names = list(dict.fromkeys(_FUNCTION.findall(ptx)))
    for number, name in enumerate(names):
        ptx = re.sub(rf"(?<![\w$]){re.escape(name)}(?=_param_|_retval|[^\w$])", f"@{number}", ptx)
    numbers: dict[str, str] = {}

    def first(found: re.Match[str]) -> str:
        kind = "$L" if found[0].startswith("$") else found[0].rstrip("0123456789")
        return numbers.setdefault(found[0], f"{kind}{len(numbers)}")

    return "\n".join(" ".join(line.split()) for line in _NUMBERED.sub(first, ptx).splitlines() if line.strip())


def _unordered(text: str) -> str:
    """The lines of canonical PTX without their registers and labels, sorted."""
    return "\n".join(sorted(_NUMBER.sub(r"\1", text).splitlines()))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _shown(value: Any) -> str:
    return str(getattr(value, "__name__", None) or value)


def note(src: Any, metadata: dict[str, Any], ptx: Path) -> dict[str, Any]:
    """One compilation: what was compiled and the hashes of what came out."""
    text = canonical(ptx.read_text())
    types: dict[tuple[int, ...], str] = {(src.fn.arg_names.index(name),): name for name in src.signature}

    def named(path: tuple[int, ...]) -> str:
        return ".".join([types.get(path[:1], str(path[0])), *map(str, path[1:])])

    divisors = {named(path): f"/{attr[0][1]}" for path, attr in src.attrs.items() if attr}
    arguments = [f"{n}:{t}{divisors.get(n, '')}" for n, t in src.signature.items() if t != "constexpr"]
    arguments += [f"{named(path)}={_shown(value)}" for path, value in src.constants.items()]
    options = [f"{o}={metadata[o]}" for o in ("num_warps", "num_stages", "num_ctas", "maxnreg") if metadata.get(o)]
    return {
        "kernel": src.fn.__name__,
        "arch": metadata["target"].arch,
        "arguments": " ".join([*options, *arguments]),
        "ptx": _sha(text),
        "lines": _sha(_unordered(text)),
        "at": str(ptx),
    }


class Recorder:
    """A pytest plugin that listens to Triton; each process writes its part when its tests are over."""

    def __init__(self, folder: Path) -> None:
        from triton import knobs

        self.folder = folder
        self.found: dict[str, dict[str, Any]] = {}
        knobs.compilation.listener = self.heard

    def heard(self, *, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any) -> None:
        for name, path in metadata_group.items():
            if name.endswith(".ptx"):
                self.found[path] = note(src, metadata, Path(path))

    def pytest_sessionfinish(self) -> None:
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(list(self.found.values())))


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Recorder(Path(os.environ[_PARTS])), "ptx-net-recorder")


def record(out: Path, words: list[str]) -> int:
    """Run the compile tier; the result is pytest's exit status."""
    import pytest
    import triton

    start = time.monotonic()
    out = out.absolute()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # xdist's workers have them too
    with tempfile.TemporaryDirectory() as folder:
        os.environ[_PARTS] = folder
        status = int(pytest.main(["-q", "-m", "compile", "-p", "tools.ptx_net", "--rootdir", str(ROOT), *words]))
        parts = [entry for part in Path(folder).glob("*.json") for entry in json.loads(part.read_text())]
    kernels = sorted({json.dumps(entry, sort_keys=True) for entry in parts})
    head = {"triton": triton.__version__, "status": status, "seconds": round(time.monotonic() - start)}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**head, "kernels": [json.loads(line) for line in kernels]}, indent=0))
    print(f"{out}: {len(kernels)} compilations of {len({k['kernel'] for k in parts})} kernels, {head['seconds']} s")
    return status


def _by_kernel(kernels: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    grouped = defaultdict(list)
    for entry in kernels:
        grouped[entry["kernel"]].append(entry)
    return grouped


def _hashes(entries: list[dict[str, Any]], what: str = "ptx") -> Counter[tuple[int, str]]:
    return Counter((entry["arch"], entry[what]) for entry in entries)


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Print what is the same, changed, missing and new; 0 if nothing differs."""
    if old["triton"] != new["triton"]:
        print(f"not comparable: Triton {old['triton']} and {new['triton']}")
        return 2
    if old["status"] or new["status"]:
        print(f"tests failed, so kernels may be missing: pytest's status {old['status']} and {new['status']}")
    before, after = _by_kernel(old["kernels"]), _by_kernel(new["kernels"])
    pairs = {name: name for name in before if name in after}
    for name in sorted(before.keys() - after.keys()):
        shared = {n: (_hashes(before[name]) & _hashes(after[n])).total() for n in after if n not in pairs.values()}
        if shared and max(shared.values()):
            pairs[name] = max(shared, key=lambda n: shared[n])
    same, differ = 0, len(before) - len(pairs) + len(after) - len(pairs)
    for name, now in pairs.items():
        ours, theirs = _hashes(before[name]), _hashes(after[now])
        title = name if name == now else f"{name} -> {now}"
        same += ours == theirs
        if ours != theirs:
            differ += 1
            order = " (order alone)" if _hashes(before[name], "lines") == _hashes(after[now], "lines") else ""
            print(f"changed  {title}: {(ours - theirs).total()} of {ours.total()} -> {(theirs - ours).total()}{order}")
            for sign, entries, lost in (("-", before[name], ours - theirs), ("+", after[now], theirs - ours)):
                odd = [entry for entry in entries if (entry["arch"], entry["ptx"]) in lost]
                for entry in odd[:2]:
                    print(f"  {sign} sm_{entry['arch']} {entry['arguments']}\n    {entry['at']}")
        elif name != now:
            print(f"renamed  {title}")
    for word, kernels, paired in (("missing", before, pairs), ("new", after, pairs.values())):
        for name in sorted(kernels.keys() - set(paired)):
            print(f"{word:8} {name}: {len(kernels[name])} compilations")
    total = sum(map(len, before.values()))
    print(f"{same} kernels of {len(before)} have the PTX they had ({total} compilations before)")
    return int(differ > 0)


def main(words: list[str]) -> int:
    match words:
        case ["record", out, *rest]:
            return record(Path(out), rest)
        case ["compare", old, new]:
            return compare(*(json.loads(Path(path).read_text()) for path in (old, new)))
    print(__doc__)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
