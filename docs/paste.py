"""Paste what the code says about itself into these pages: `python docs/paste.py`, or `make docs`.

A page asks for it between two comments, and what is between them is written anew each time:

    <!-- paste: options swap -->        arguments and options of a command, as a table
    <!-- end -->

Others are `commands` (a list with links), `api NAME NAME...` (signatures and docstrings) and `families`
(the table of model families). A command without a page gets one. `tests/test_docs.py` fails on a page that is stale.

Tables are made from the commands' own parameters, not from `--help`, whose boxes change with the
terminal and with the version of rich.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

import howlinear
from howlinear.cli.app import app
from howlinear.models.families import FAMILIES, Family

DOCS = Path(__file__).parent
SPAN = re.compile(r"(<!-- paste: ([^\n]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
WORDS = {int: "number", float: "number", Path: "path", str: "text"}


def pasted(text: str) -> str:
    """A page as it should be."""
    return SPAN.sub(lambda m: f"{m[1]}{_paste(*m[2].split())}\n{m[3]}", text)


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


@cache
def commands() -> dict[str, Any]:
    """Every command by what one types: "profile", "control matched"."""
    return dict(_walk("", typer.main.get_command(app)))


def page_of(command: str) -> Path:
    return DOCS / "commands" / f"{command.split()[0]}.md"


def flags(command: Any) -> set[str]:
    """Every spelling of every option of a command."""
    spelled = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    return {name for name in spelled if name.startswith("-")} | {"--help"}


def _walk(prefix: str, command: Any) -> Iterator[tuple[str, Any]]:
    named = getattr(command, "commands", {})
    for name in command.list_commands(None) if named else ():  # in the order of --help
        inner = named[name]
        if hasattr(inner, "commands"):
            yield from _walk(f"{prefix}{name} ", inner)
        else:
            yield prefix + name, inner


def _paste(kind: str, *names: str) -> str:
    if kind == "options":
        return _options(" ".join(names))
    if kind == "commands":
        return "\n".join(_listed(name, command) for name, command in commands().items())
    if kind == "api":
        return "\n\n".join(_api(name) for name in names)
    if kind == "families":
        return _families()
    raise ValueError(f"<!-- paste: {kind} -->: there is options, commands, api and families")


# ------------------------------------------------------------------------------- commands


def _listed(name: str, command: Any) -> str:
    page = page_of(name).relative_to(DOCS)
    return f"- [`howlinear {name}`]({page}): {_lower(_first_line(command))}"


def _options(name: str) -> str:
    command = commands()[name]
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    arguments = [p for p in command.params if not p.opts[0].startswith("-")]
    options = [p for p in command.params if p.opts[0].startswith("-")]
    usage = " ".join(["howlinear", name, "[OPTIONS]", *map(_usage, arguments)])
    rows = [f"| `{_shown(p)}` | | | {_help(hints[p.name])} |" for p in arguments]
    rows += [
        f"| {_spelled(p)} | {_takes(hints[p.name])} | {_default(p)} | {_help(hints[p.name])} |"
        for p in options
    ]
    head = "| | takes | default | |\n|---|---|---|---|"
    return "\n".join([f"`{usage}`", "", _first_line(command), "", head, *rows])


def _first_line(command: Any) -> str:
    return (inspect.getdoc(inspect.unwrap(command.callback)) or "").split("\n")[0]


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _shown(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _usage(parameter: Any) -> str:
    name = _shown(parameter)
    return name if parameter.required else f"[{name}]"


def _spelled(parameter: Any) -> str:
    names = sorted(parameter.opts, key=len) + list(parameter.secondary_opts)
    return ", ".join(f"`{name}`" for name in names)


def _takes(annotated: Any) -> str:
    """What to write after the flag: nothing, one of some words, a number, a path, a text."""
    hint = get_args(annotated)[0]
    union = get_origin(hint) in (Union, types.UnionType)
    (hint,) = [a for a in get_args(hint) if a is not type(None)] if union else [hint]
    if get_origin(hint) is list:
        return f"{WORDS[get_args(hint)[0]]}, may be repeated"
    if hint is bool:
        return ""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    return WORDS[hint]


def _default(parameter: Any) -> str:
    value = getattr(parameter.default, "value", parameter.default)
    if parameter.required:
        return "required"
    if value is True and parameter.secondary_opts:
        return f"`{parameter.opts[0]}`"
    return "" if value is None or value is False or value == () else f"`{value}`"


def _help(annotated: Any) -> str:
    return (get_args(annotated)[1].help or "").replace("|", "\\|")


# ------------------------------------------------------------------------------ the library


def _api(name: str) -> str:
    found = getattr(howlinear, name)
    doc = (inspect.getdoc(found) or "").replace("](", "]\\(")  # no link is meant
    call = textwrap.fill(_signature(name, found), 100, subsequent_indent="    ")
    return f"### `{name}`\n\n```\n{call}\n```\n\n{doc}"


def _signature(name: str, found: Any) -> str:
    """Names and defaults. Types are left to the docstring: versions of Python write them differently."""
    signature = inspect.signature(found)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    call = f"{name}{signature.replace(parameters=bare, return_annotation=signature.empty)}"
    if inspect.isgeneratorfunction(inspect.unwrap(found)):
        return f"with {call}:"
    result = signature.return_annotation
    gives = isinstance(result, str) and result != "None"
    return f"{call} -> {result}" if gives else call


def _families() -> str:
    alike: dict[tuple[Family, ...], list[str]] = {}
    for name, rows in FAMILIES.items():
        alike.setdefault(rows, []).append(name)
    lines = ["| `model_type` | block in each layer | made of | norm |", "|---|---|---|---|"]
    for rows, names in alike.items():
        for row in rows:
            lines.append(f"| {', '.join(names)}{_only_if(row)} | {_where(row)} |")
    return "\n".join(lines)


def _only_if(row: Family) -> str:
    return f" (`{row.when[0]}={row.when[1]}`)" if row.when else ""


def _where(row: Family) -> str:
    steps = " → ".join(f"`{step}`" for step in row.steps) or "one module"
    if not row.steps and row.down:
        steps += f", last projection `{row.down}`"
    norm = f"before the add: `{row.out_norm}`" if row.out_norm else ""
    norm = f"after the add: `{row.after}`" if row.after else norm
    return f"`{row.layers}.{row.path}` | {steps} | {norm}"


# ------------------------------------------------------------------------------------ pages


def new_page(command: str) -> str:
    names = [name for name in commands() if page_of(name) == page_of(command)]
    heads = ["## Options"] if len(names) == 1 else [f"## Options of `{n}`" for n in names]
    asked = [f"<!-- paste: options {name} -->\n<!-- end -->\n" for name in names]
    parts = [f"{head}\n\n{paste}" for head, paste in zip(heads, asked, strict=True)]
    return "\n".join([f"# howlinear {command.split()[0]}\n", *parts])


def main() -> None:
    for command in commands():
        if not page_of(command).exists():
            page_of(command).write_text(new_page(command), encoding="utf-8")
            print(f"new, write its beginning: {page_of(command)}")
    for page in pages():
        old = page.read_text(encoding="utf-8")
        if (new := pasted(old)) != old:
            page.write_text(new, encoding="utf-8")
            print(f"written: {page}")


if __name__ == "__main__":
    main()
