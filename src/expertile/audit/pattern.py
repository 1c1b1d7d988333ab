"""Regular expressions that are compiled when they are first used: a report needs a part of them."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from re import compile as regex
else:

    class regex:
        def __init__(self, pattern: str) -> None:
            self.pattern = pattern

        def __getattr__(self, name: str) -> Any:
            """A method of the compiled pattern, which it keeps."""
            value = self.__dict__[name] = getattr(re.compile(self.pattern), name)
            return value


_NO = regex(  # "no X", "nothing is offloaded", "without A, B or X"
    r"(?i)(?:\b(?:not|nothing|never|neither|nor|non)|n't|"
    r"(?<![\w.,-])(?:no|without|zero|0)(?:(?: [\w-]+){1,3},(?: or| nor| and)?){0,4})"
    r"\b[\s-](?:[^.,;:|()\n]|\n(?![\n#*|-])|:(?=\d)){0,30}$"
)
_OFF = regex(  # "X: off", "X is not used"
    r"(?i)[\w-]*(?:[ _]\w+)?(?: / \w+)*[\"'*`]*[ \n]?(?:[:=|]|is|was|are|were|stays?)?[\"'*` ]*"
    r"\b(?:not(?! only| just)|never|off|none|null|no|neither|false|disabled|unused)\b"
)


def says(form: "re.Pattern[str]", text: str) -> bool:
    """Whether a text has something of a form and does not deny it."""
    return any(not denied(m, text) for m in form.finditer(text))


def denied(m: "re.Match[str]", text: str) -> bool:
    """Whether a text denies what it says there."""
    return bool(_NO.search(text[max(0, m.start() - 80) : m.start()]) or _OFF.match(text, m.end()))
