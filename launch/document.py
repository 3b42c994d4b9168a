"""A report as blocks, written once and shown twice: as one HTML page that holds its pictures, and
as Markdown beside them."""

from __future__ import annotations

import base64
import dataclasses
import html
import os
import re
from pathlib import Path

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto;
  max-width: 70rem; padding: 1rem; }
h1, h2, h3 { line-height: 1.2; margin: 2rem 0 .5rem; }
h2 { border-bottom: 1px solid #ccc; padding-bottom: .25rem; }
p { max-width: 48rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: left;
  vertical-align: top; white-space: nowrap; }
th { background: #f4f4f4; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0; }
figure { margin: 0; flex: 1 1 22rem; max-width: 34rem; }
img { max-width: 100%; height: auto; }
figcaption { font-size: .875rem; color: #555; }
pre { background: #f4f4f4; padding: .75rem; overflow-x: auto; font-size: .8125rem; }
code { background: #f4f4f4; font-size: .875em; }
summary { cursor: pointer; }
"""


@dataclasses.dataclass
class Heading:
    level: int
    text: str


@dataclasses.dataclass
class Text:
    """A paragraph; `code` and **strong** are marked as in Markdown."""

    text: str


@dataclasses.dataclass
class Items:
    items: list[str]


@dataclasses.dataclass
class Table:
    head: list[str]
    rows: list[list[str]]


@dataclasses.dataclass
class Figures:
    """Pictures side by side: (file, caption)."""

    figures: list[tuple[Path, str]]


@dataclasses.dataclass
class Code:
    """Lines as they are, folded away under their title."""

    title: str
    lines: list[str]


Block = Heading | Text | Items | Table | Figures | Code


def marked(text: str) -> str:
    """Escaped text with its `code` and **strong** as HTML."""
    out = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", out)


def row(cells: list[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{marked(cell)}</{tag}>" for cell in cells) + "</tr>"


def picture(path: Path, caption: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    text = html.escape(caption)
    source = f"data:image/png;base64,{data}"
    return f'<figure><img alt="{text}" src="{source}"><figcaption>{text}</figcaption></figure>'


def block_html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{marked(text)}</h{level}>"
        case Text(text):
            return f"<p>{marked(text)}</p>"
        case Items(items):
            return "<ul>" + "".join(f"<li>{marked(item)}</li>" for item in items) + "</ul>"
        case Table(head, rows):
            body = "\n".join(row(cells, "td") for cells in rows)
            return f'<div class="scroll"><table>{row(head, "th")}\n{body}</table></div>'
        case Figures(figures):
            return '<div class="figures">' + "\n".join(picture(*f) for f in figures) + "</div>"
        case Code(title, lines):
            text = html.escape("\n".join(lines))
            return f"<details><summary>{marked(title)}</summary><pre>{text}</pre></details>"


def to_html(title: str, blocks: list[Block]) -> str:
    body = "\n".join(map(block_html, blocks))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def block_markdown(block: Block, folder: Path) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Items(items):
            return "\n".join(f"- {item}" for item in items)
        case Table(head, rows):
            lines = [head, ["---"] * len(head), *rows]
            return "\n".join(
                "| " + " | ".join(" ".join(c.split()).replace("|", r"\|") for c in r) + " |"
                for r in lines
            )
        case Figures(figures):
            return "\n\n".join(
                f"![{text}]({os.path.relpath(path, folder)})" for path, text in figures
            )
        case Code(title, lines):
            return f"{title}:\n\n" + "\n".join(f"    {line}" for line in lines)


def to_markdown(blocks: list[Block], folder: Path) -> str:
    """Pictures are named relative to `folder`, where the text will be."""
    return "\n\n".join(block_markdown(block, folder) for block in blocks) + "\n"
