"""An expression restricted to some targets, by matchers in each of its selectors.

The text is edited, not printed anew: promql-parser prints durations without milliseconds and strings without escapes.
"""

import re
from collections.abc import Collection

from diag.promql.facts import metric_names
from diag.promql.parse import parse

_STRING = r'"(?:\\.|[^"\\])*"|' r"'(?:\\.|[^'\\])*'|`[^`]*`"
_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def add_matchers(promql: str, matchers: str, parts: Collection[str] = ()) -> str:
    """Return the expression with `matchers`, `job="vllm",cluster="eu"` for example, in each selector.

    The names in `parts` are left as they are: other expressions are going to replace them.
    """
    if not matchers:
        return promql
    selected = metric_names(parse(promql)).difference(parts)
    names = "|".join(name for name in selected if _METRIC.fullmatch(name)) or "{"
    bare = rf"(?<![\w:])(?:{names})(?![\w:]|\s*\{{)"

    def put(found: re.Match[str]) -> str:
        if found["string"]:
            return found[0]
        return f"{{{matchers}," if found[0] == "{" else f"{found[0]}{{{matchers}}}"

    return re.sub(rf"(?P<string>{_STRING})|\{{|{bare}", put, promql)
