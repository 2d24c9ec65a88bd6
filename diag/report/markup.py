"""Elements of SVG; text that is not markup yet is escaped."""

from markupsafe import Markup

from diag.core.formatting import escaped


def element(tag: str, /, *inside: str, **attributes: object) -> Markup:
    """An element around text or markup; `class_` is its class, an underscore in a name stands for a hyphen."""
    given = (
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), escaped(str(value)))
        for name, value in attributes.items()
    )
    start = Markup("<{}{}").format(tag, Markup("").join(given))
    content = Markup("").join(part if isinstance(part, Markup) else escaped(part) for part in inside)
    return start + (Markup(">{}</{}>").format(content, tag) if inside else Markup("/>"))
