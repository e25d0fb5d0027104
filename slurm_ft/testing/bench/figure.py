"""The benchmark's results as a table and as an SVG bar chart. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Spread = tuple[float, float, float] | None
BAR, GAP, LEFT, WIDTH = 18, 8, 270, 560


def seconds(value: Spread) -> str:
    """`median (smallest-largest)`; `-` for what was not seen."""
    return "-" if value is None else f"{value[0]:.2f} ({value[1]:.2f}-{value[2]:.2f})"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(heads), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])


def svg(title: str, bars: Mapping[str, Spread], unit: str = "s") -> str:
    """Horizontal bars of medians with a line from the smallest to the largest."""
    seen = {name: value for name, value in bars.items() if value is not None}
    longest = max((value[2] for value in seen.values()), default=1.0) or 1.0
    scale = (WIDTH - 90) / longest
    parts = [f'<text x="8" y="20" font-weight="bold">{escape(title)}</text>']
    y = 34
    for name, (middle, low, high) in seen.items():
        colour, text_y = ("#2b6cb0" if name.startswith("slurm-ft") else "#a0aec0"), y + BAR - 5
        parts += [
            f'<text x="{LEFT - 8}" y="{text_y}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{middle * scale:.1f}" height="{BAR}" fill="{colour}"/>',
            f'<path d="M{LEFT + low * scale:.1f} {y + BAR / 2}H{LEFT + high * scale:.1f}" stroke="#1a202c"/>',
            f'<text x="{LEFT + high * scale + 6:.1f}" y="{text_y}">{middle:.2f} {unit}</text>',
        ]
        y += BAR + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH}" height="{y + 6}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="12">', *parts, "</svg>"]) + "\n"
