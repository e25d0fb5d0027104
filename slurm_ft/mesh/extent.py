"""Named dimensions in Monarch's vocabulary: an extent, its points, and the regions that slicing gives.

An `Extent` is labels and sizes. A `Point` is one place in it; places are numbered in row-major order (the
last dimension runs fastest). A `Region` is a part of an extent, kept as an offset and strides into the
numbering of the extent that it was cut from. So slicing is arithmetic on a few numbers, a slice of a slice is
again a region of the same extent, and iterating over a region gives the numbers of the whole.

Misuse raises what Python's own containers raise, as in Monarch: TypeError for a dimension that does not
exist, KeyError for one that is missing, IndexError for a place outside.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class Extent:
    """Labels and sizes. Raises ValueError for labels that repeat, sizes under 1, or counts that differ."""

    labels: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.sizes):
            raise ValueError(f"{len(self.labels)} labels for {len(self.sizes)} sizes")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"a label is there twice: {self.labels}")
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"every size is 1 or more: {self}")

    @property
    def size(self) -> int:
        """The number of places; 1 when there are no dimensions."""
        return math.prod(self.sizes)

    @property
    def nelements(self) -> int:
        """The same, by Monarch's name."""
        return self.size

    @property
    def strides(self) -> tuple[int, ...]:
        """How far the number of a place moves when one step is made along each dimension."""
        return tuple(math.prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes)))

    def point(self, index: int) -> Point:
        """Give the place with this number. Raises IndexError if it is outside."""
        return Point(self, index)

    def index(self, **coordinates: int) -> int:
        """Give the number of the place at these coordinates; all dimensions must be given."""
        return self.region.index(**coordinates)

    @property
    def region(self) -> Region:
        """The whole extent, as a region of itself."""
        return Region(self.labels, self.sizes, self.strides)

    def slice(self, **selection: int | slice) -> Region:
        """Cut a region out; see `Region.slice`."""
        return self.region.slice(**selection)

    def flatten(self, name: str) -> Region:
        """Lay all dimensions into one, in row-major order."""
        return self.region.flatten(name)

    def __iter__(self) -> Iterator[Point]:
        return (Point(self, index) for index in range(self.size))

    def __len__(self) -> int:
        return self.size

    def __str__(self) -> str:
        sizes = zip(self.labels, self.sizes, strict=True)
        return "{" + ", ".join(f"{label}: {size}" for label, size in sizes) + "}"


@dataclasses.dataclass(frozen=True)
class Point(Mapping[str, int]):
    """One place in an extent: a mapping of its coordinates, with its number as `rank`.

    Raises IndexError if it is outside.
    """

    extent: Extent
    index: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.extent.size:
            raise IndexError(f"place {self.index} is outside {self.extent}, which has {self.extent.size} places")

    @property
    def coordinates(self) -> dict[str, int]:
        """The coordinate along each dimension."""
        steps = zip(self.extent.labels, self.extent.strides, self.extent.sizes, strict=True)
        return {label: self.index // stride % size for label, stride, size in steps}

    @property
    def rank(self) -> int:
        """The number of the place, by Monarch's name."""
        return self.index

    def size(self, label: str) -> int:
        """The size of the extent along a dimension. Raises KeyError if there is none of that name."""
        return dict(zip(self.extent.labels, self.extent.sizes, strict=True))[label]

    def __getitem__(self, label: str) -> int:
        return self.coordinates[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self.extent.labels)

    def __len__(self) -> int:
        return len(self.extent.labels)

    def __str__(self) -> str:
        places = zip(self.coordinates.items(), self.extent.sizes, strict=True)
        return "{" + ", ".join(f"{label}: {at}/{size}" for (label, at), size in places) + "}"


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of an extent. Iterating gives the numbers its places have in the whole, in row-major order."""

    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def extent(self) -> Extent:
        """The region's own labels and sizes; its points are numbered from 0 within the region."""
        return Extent(self.labels, self.sizes)

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def index(self, **coordinates: int) -> int:
        """Give the number in the whole of the place at these coordinates of the region; all must be given."""
        self._check_labels(coordinates)
        found = self.offset
        for label, size, stride in zip(self.labels, self.sizes, self.strides, strict=True):
            found += _checked(label, coordinates[label], size) * stride
        return found

    def slice(self, **selection: int | slice) -> Region:
        """Cut a part out: a number picks a coordinate and removes the dimension, a slice keeps it.

        Raises IndexError for a number outside (negative ones too) and for a slice that picks nothing.
        """
        self._check_labels(selection)
        offset = self.offset
        kept: list[tuple[str, int, int]] = []
        for label, size, stride in zip(self.labels, self.sizes, self.strides, strict=True):
            chosen = selection.get(label, slice(None))
            if isinstance(chosen, int):
                offset += _checked(label, chosen, size) * stride
                continue
            steps = range(size)[chosen]
            if not steps:
                raise IndexError(f"{label}={chosen} picks nothing out of {size}")
            offset += steps.start * stride
            kept.append((label, len(steps), stride * steps.step))
        return _region(kept, offset)

    def flatten(self, name: str) -> Region:
        """Lay all dimensions into one. Raises ValueError if one stride cannot reach all places."""
        # A dimension of size 1 is never stepped along, so its stride says nothing.
        walked = [(size, stride) for size, stride in zip(self.sizes, self.strides, strict=True) if size > 1]
        for (_, outer), (size, inner) in itertools.pairwise(walked):
            if outer != size * inner:
                raise ValueError(f"the region {self.extent} has gaps and cannot be flattened")
        return Region((name,), (self.size,), (walked[-1][1] if walked else 1,), self.offset)

    def rename(self, **names: str) -> Region:
        """Give dimensions other names: `rename(host="node")`. Raises ValueError for a name that is taken."""
        self._check_labels(names)
        labels = tuple(names.get(label, label) for label in self.labels)
        Extent(labels, self.sizes)
        return dataclasses.replace(self, labels=labels)

    def split(self, **parts: tuple[str, ...] | int) -> Region:
        """Cut dimensions into several: `split(gpu=("dp", "tp"), tp=2)` makes 8 gpus {dp: 4, tp: 2}.

        Of each dimension's new sizes one may be left out. Raises ValueError when they do not multiply to the
        dimension's size, TypeError for a size that belongs to no new dimension.
        """
        cuts = {label: part for label, part in parts.items() if not isinstance(part, int)}
        given = {label: part for label, part in parts.items() if isinstance(part, int)}
        self._check_labels(cuts)
        stray = sorted(set(given) - set(itertools.chain.from_iterable(cuts.values())))
        if stray:
            raise TypeError(f"a size is given for {stray[0]!r}, which no dimension is split into")
        kept: list[tuple[str, int, int]] = []
        for label, size, stride in zip(self.labels, self.sizes, self.strides, strict=True):
            if label not in cuts:
                kept.append((label, size, stride))
                continue
            inner = stride * size
            for name, part in zip(cuts[label], _part_sizes(label, size, cuts[label], given), strict=True):
                inner //= part
                kept.append((name, part, inner))
        Extent(tuple(label for label, _, _ in kept), tuple(size for _, size, _ in kept))
        return _region(kept, self.offset)

    def __iter__(self) -> Iterator[int]:
        axes = zip(self.sizes, self.strides, strict=True)
        steps = [range(0, size * stride, stride) for size, stride in axes]
        return (self.offset + sum(step) for step in itertools.product(*steps))

    def __len__(self) -> int:
        return self.size

    def _check_labels(self, given: Iterable[str]) -> None:
        unknown = [label for label in given if label not in self.labels]
        if unknown:
            raise TypeError(f"no dimension {unknown[0]!r} in {self.extent}")


def _region(kept: list[tuple[str, int, int]], offset: int) -> Region:
    return Region(
        tuple(label for label, _, _ in kept),
        tuple(size for _, size, _ in kept),
        tuple(stride for _, _, stride in kept),
        offset,
    )


def _part_sizes(label: str, size: int, names: tuple[str, ...], given: Mapping[str, int]) -> list[int]:
    open_names = [name for name in names if name not in given]
    known = math.prod(given[name] for name in names if name in given)
    fits = known >= 1 and size % known == 0 if len(open_names) == 1 else not open_names and known == size
    if not fits:
        words = ", ".join(f"{name}={given[name]}" if name in given else name for name in names)
        raise ValueError(f"{label} of size {size} cannot be split into ({words})")
    return [given.get(name, size // known) for name in names]


def _checked(label: str, coordinate: int, size: int) -> int:
    if not 0 <= coordinate < size:
        raise IndexError(f"{label}={coordinate} is outside 0 to {size - 1}")
    return coordinate
