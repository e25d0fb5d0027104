"""The answers of a call, keyed by coordinates, with holes where there is none.

A `ValueMesh` is made of what each process answered: a value or an error. It never hides an error: whoever
reaches for a value that is not there gets the error raised, and a ValueMesh that is thrown away while
nobody has looked at its errors says so in the log. `ok()` and `failed()` are for those who can go on with
a part of the answers, where Monarch throws away the good ones.
"""

from __future__ import annotations

import html
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from slurm_ft.mesh.errors import MeshError
from slurm_ft.mesh.extent import Extent, Point, Region

R = TypeVar("R")
log = logging.getLogger("slurm_ft.mesh")

SHOWN = 64
"""Rows of a table in a notebook, at most."""


class ValueMesh(Generic[R]):
    """Answers over an extent. A place that shrinking took out of the mesh has neither a value nor an error."""

    def __init__(
        self, extent: Extent, values: Mapping[int, R], errors: Mapping[int, MeshError], what: str = ""
    ) -> None:
        self.extent = extent
        self._values, self._errors, self._what = dict(values), dict(errors), what
        self._looked = not errors

    def items(self) -> Iterator[tuple[Point, R]]:
        """(point, value) in row-major order. Raises as `check` does."""
        return iter(self.check().ok())

    def values(self) -> Iterator[R]:
        """The values in row-major order. Raises as `check` does."""
        return (value for _, value in self.items())

    __iter__ = items

    def item(self, **coordinates: int) -> R:
        """The value at these coordinates; dimensions of size 1 may be left out.

        Raises the place's error, and KeyError when it has been taken out of the mesh.
        """
        ones = {label: 0 for label, size in zip(self.extent.labels, self.extent.sizes, strict=True) if size == 1}
        return self._at(self.extent.index(**{**ones, **coordinates}))

    def slice(self, **selection: int | slice) -> ValueMesh[R]:
        """A part of the answers, with the part's own coordinates."""
        self._looked = True
        region = self.extent.slice(**selection)
        places = dict(enumerate(region))
        values = {new: self._values[old] for new, old in places.items() if old in self._values}
        errors = {new: self._errors[old] for new, old in places.items() if old in self._errors}
        return ValueMesh(region.extent, values, errors, self._what)

    def flatten(self, name: str) -> ValueMesh[R]:
        """The same answers along one dimension."""
        self._looked = True
        return ValueMesh(Extent((name,), (self.extent.size,)), self._values, self._errors, self._what)

    def ok(self) -> list[tuple[Point, R]]:
        """(point, value) of those that answered."""
        self._looked = True
        return [(self.extent.point(rank), self._values[rank]) for rank in sorted(self._values)]

    def failed(self) -> list[tuple[Point, MeshError]]:
        """(point, error) of those that did not."""
        self._looked = True
        return [(self.extent.point(rank), self._errors[rank]) for rank in sorted(self._errors)]

    def check(self) -> ValueMesh[R]:
        """Give the answers back if there is no error among them, else raise the first one."""
        self._looked = True
        if self._errors:
            first, *others = (error for _, error in self.failed())
            raise _with_note(first, others)
        return self

    @property
    def size(self) -> int:
        return self.extent.size

    def __len__(self) -> int:
        return self.extent.size

    def _at(self, rank: int) -> R:
        self._looked = True
        if rank in self._errors:
            raise self._errors[rank]
        if rank not in self._values:
            raise KeyError(f"{self.extent.point(rank)} was taken out of the mesh")
        return self._values[rank]

    def __del__(self) -> None:
        if not getattr(self, "_looked", True):
            first = next(iter(self._errors.values()))
            log.error("%d of %d answers of %s are errors that nobody looked at, the first: %s",
                      len(self._errors), self.extent.size, self._what or "a call", first)  # fmt: skip

    def __repr__(self) -> str:
        failed = f", {len(self._errors)} failed" if self._errors else ""
        shown = ", ".join(f"{self.extent.point(rank)}: {_short(self._cell(rank))}" for rank in range(min(self.size, 8)))
        more = ", ..." if self.size > 8 else ""
        return f"ValueMesh({self.extent}{failed}; {shown}{more})"

    def _repr_html_(self) -> str:
        labels = "".join(f"<th>{html.escape(label)}</th>" for label in self.extent.labels)
        rows = []
        for rank in range(min(self.size, SHOWN)):
            cells = "".join(f"<td>{at}</td>" for at in self.extent.point(rank).values())
            rows.append(f"<tr>{cells}<td><code>{html.escape(_short(self._cell(rank), 200))}</code></td></tr>")
        more = f"<caption>{self.size - SHOWN} more</caption>" if self.size > SHOWN else ""
        return f"<table>{more}<tr>{labels}<th>value</th></tr>{''.join(rows)}</table>"

    def _cell(self, rank: int) -> Any:
        return self._errors.get(rank) or self._values.get(rank, "(taken out)")


def part_of(region: Region, index: int) -> Point:
    """The point in a region of the place that has the number `index` in the whole. Raises KeyError if outside."""
    for rank, place in enumerate(region):
        if place == index:
            return region.extent.point(rank)
    raise KeyError(f"place {index} is not in {region.extent}")


def _short(value: Any, width: int = 40) -> str:
    text = f"{type(value).__name__}: {str(value).splitlines()[0]}" if isinstance(value, MeshError) else repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def _with_note(error: MeshError, others: list[MeshError]) -> MeshError:
    if others and not getattr(error, "__notes__", None):
        error.add_note(f"and {len(others)} more: " + "; ".join(str(other.point) for other in others[:8]))
    return error
