"""Text that may hold names of the user's program, as each format takes it: it shows, and never acts."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable
from typing import Any


def printable(text: str) -> str:
    r"""ASCII on one line: what else there is becomes an escape, like `\x1b`, and so does a backslash."""
    return "".join(c if " " <= c <= "~" and c != "\\" else ascii(c)[1:-1] for c in text)


def comments(lines: Iterable[str]) -> str:
    """Lines of `# text`, which no name can end; long ones go on below, indented."""
    wrapped = (
        textwrap.wrap(
            printable(line), 108, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        for line in lines
    )
    return "".join(f"# {piece}\n" for pieces in wrapped for piece in pieces)


def yaml_scalar(value: bool | int | str) -> str:
    """Strings in double quotes, all else in them as YAML 1.1 and 1.2 both escape it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return '"' + "".join(_yaml_character(c) for c in value) + '"'


def _yaml_character(c: str) -> str:
    if c in '"\\':
        return "\\" + c
    if " " <= c <= "~":
        return c
    code = ord(c)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def yaml_mapping(value: dict[str, Any], indent: str = "") -> str:
    """A block mapping of scalars and of such mappings."""
    lines = []
    for key, item in value.items():
        if isinstance(item, dict):
            lines.append(f"{indent}{key}:\n{yaml_mapping(item, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {yaml_scalar(item)}\n")
    return "".join(lines)


def shell_array(name: str, groups: Iterable[tuple[str, ...]]) -> str:
    """A bash array, an option and its values on a line."""
    lines = "".join("    " + " ".join(shlex.quote(word) for word in group) + "\n" for group in groups)
    return f"{name}=(\n{lines})\n"
