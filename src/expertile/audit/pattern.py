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
