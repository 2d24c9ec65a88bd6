"""Elements of HTML and SVG as text; whatever is not markup yet goes through `escape`."""

import html

from diag.core.formatting import escaped


def escape(text: str) -> str:
    """Text that a browser shows as it is, with what it would obey made visible."""
    return html.escape(escaped(text))


def element(tag: str, /, *inside: str, **attributes: object) -> str:
    """An element around markup; `class_` is its class, and an underscore in a name stands for a hyphen."""
    names = (name.rstrip("_").replace("_", "-") for name in attributes)
    told = "".join(f' {name}="{escape(str(value))}"' for name, value in zip(names, attributes.values(), strict=True))
    return f"<{tag}{told}>{''.join(inside)}</{tag}>" if inside else f"<{tag}{told}/>"
