"""Extents, points and regions: arithmetic that agrees with walking through all places one by one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_ft.mesh.extent import Extent, Region

MESH = Extent(("replica", "host", "gpu"), (4, 1, 8))

extents = st.lists(st.integers(1, 5), max_size=4).map(lambda sizes: Extent(tuple("abcd"[: len(sizes)]), tuple(sizes)))


@st.composite
def selections(draw: st.DrawFn, extent: Extent) -> dict[str, int | slice]:
    """Some dimensions of an extent with a coordinate or a slice that picks something."""
    chosen: dict[str, int | slice] = {}
    for label, size in zip(extent.labels, extent.sizes, strict=True):
        kind = draw(st.sampled_from(["leave", "number", "slice"]))
        if kind == "number":
            chosen[label] = draw(st.integers(0, size - 1))
        elif kind == "slice":
            part = draw(st.slices(size))
            chosen[label] = part if range(size)[part] else slice(None)
    return chosen


Walk = dict[tuple[int, ...], int]


def walked(extent: Extent) -> Walk:
    """Every coordinate tuple of an extent with its number, by counting."""
    places = itertools.product(*(range(size) for size in extent.sizes))
    return {coordinates: number for number, coordinates in enumerate(places)}


def picked(whole: Walk, labels: tuple[str, ...], sizes: tuple[int, ...], chosen: dict[str, int | slice]) -> Walk:
    """The part of a walk that a selection picks, by looking every place up: the slow way."""
    keep = [chosen.get(label, slice(None)) for label in labels]
    steps = [
        [part] if isinstance(part, int) else list(range(size))[part] for part, size in zip(keep, sizes, strict=True)
    ]
    found: Walk = {}
    for positions in itertools.product(*(range(len(axis)) for axis in steps)):
        place = tuple(axis[position] for axis, position in zip(steps, positions, strict=True))
        left = tuple(at for at, part in zip(positions, keep, strict=True) if not isinstance(part, int))
        found[left] = whole[place]
    return found


@given(extents)
def test_index_and_point_are_one_to_one_in_row_major_order(extent: Extent) -> None:
    points = list(extent)
    assert len(points) == len(extent) == extent.size
    assert [tuple(point.coordinates.values()) for point in points] == list(walked(extent))
    for index, point in enumerate(points):
        assert point == extent.point(index)
        assert extent.index(**point.coordinates) == point.index == index
        assert all(point[label] == at for label, at in point.coordinates.items())


@given(st.data(), extents)
def test_a_slice_of_a_slice_is_the_same_as_looking_up_every_place(data: st.DataObject, extent: Extent) -> None:
    first = data.draw(selections(extent))
    once = extent.slice(**first)
    walk = picked(walked(extent), extent.labels, extent.sizes, first)
    assert list(once) == list(walk.values())
    second = data.draw(selections(once.extent))
    twice = once.slice(**second)
    walk = picked(walk, once.labels, once.sizes, second)
    assert list(twice) == list(walk.values())
    assert [twice.index(**point.coordinates) for point in twice.extent] == list(twice)
    assert len(twice) == twice.size == twice.extent.size


@given(st.data(), extents)
def test_a_region_is_flattened_to_the_same_numbers_or_refused(data: st.DataObject, extent: Extent) -> None:
    region = extent.slice(**data.draw(selections(extent)))
    numbers = list(region)
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    if len(steps) > 1:
        with pytest.raises(ValueError, match="gaps"):
            region.flatten("rank")
    else:
        flat = region.flatten("rank")
        assert list(flat) == numbers
        assert flat.extent == Extent(("rank",), (len(numbers),))


def test_a_number_removes_a_dimension_and_a_slice_keeps_it() -> None:
    assert MESH.slice(replica=2) == Region(("host", "gpu"), (1, 8), (8, 1), offset=16)
    every_other = MESH.slice(replica=slice(0, 4, 2))
    assert every_other.extent == Extent(("replica", "host", "gpu"), (2, 1, 8))
    assert list(every_other.slice(gpu=0)) == [0, 16]
    assert list(every_other.slice(replica=1, host=0)) == list(range(16, 24))


def test_a_whole_extent_is_flattened_in_row_major_order() -> None:
    assert list(MESH.flatten("rank")) == list(range(32))


def test_an_extent_without_dimensions_has_one_place() -> None:
    assert Extent((), ()).size == 1
    assert list(MESH.slice(replica=1, host=0, gpu=3)) == [11]


def test_extents_and_points_print_as_monarchs_do() -> None:
    assert str(MESH) == "{replica: 4, host: 1, gpu: 8}"
    assert str(MESH.point(11)) == "{replica: 1/4, host: 0/1, gpu: 3/8}"


def test_misuse_raises_what_pythons_containers_raise() -> None:
    with pytest.raises(TypeError, match="no dimension 'rack'"):
        MESH.slice(rack=1)
    with pytest.raises(TypeError, match="no dimension"):
        MESH.index(replica=0, host=0, gpu=0, rack=0)
    with pytest.raises(KeyError, match="gpu"):
        MESH.index(replica=0, host=0)
    with pytest.raises(KeyError):
        MESH.point(0)["rack"]
    for outside in (-1, 32):
        with pytest.raises(IndexError, match="outside"):
            MESH.point(outside)
    for outside in (-1, 4):
        with pytest.raises(IndexError, match="outside 0 to 3"):
            MESH.slice(replica=outside)
    with pytest.raises(IndexError, match="picks nothing"):
        MESH.slice(replica=slice(2, 2))


@pytest.mark.parametrize(
    ("labels", "sizes", "what"),
    [(("a",), (1, 2), "1 labels"), (("a", "a"), (1, 2), "twice"), (("a", "b"), (1, 0), "1 or more")],
)
def test_an_extent_that_cannot_be_is_refused(labels: tuple[str, ...], sizes: tuple[int, ...], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        Extent(labels, sizes)


def test_a_point_is_a_mapping_of_its_coordinates() -> None:
    point = MESH.point(9)
    assert dict(point) == {"replica": 1, "host": 0, "gpu": 1} and len(point) == 3
    assert (point.rank, point.size("gpu"), MESH.nelements) == (9, 8, 32)
    with pytest.raises(KeyError):
        point.size("node")


@given(st.data(), extents)
def test_splitting_and_renaming_keep_every_place_in_order(data: st.DataObject, extent: Extent) -> None:
    if not extent.labels:
        return
    label = data.draw(st.sampled_from(extent.labels))
    size = dict(zip(extent.labels, extent.sizes, strict=True))[label]
    inner = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    split = extent.region.split(**{label: ("outer", "inner"), "inner": inner})
    assert list(split) == list(extent.region)
    assert dict(zip(split.labels, split.sizes, strict=True))["outer"] == size // inner
    assert list(extent.region.rename(**{label: "new"})) == list(extent.region)


def test_a_split_of_a_slice_is_a_part_of_the_whole() -> None:
    part = MESH.slice(replica=slice(1, 3), host=0, gpu=slice(0, 8, 2)).split(gpu=("dp", "tp"), tp=2)
    assert part.extent == Extent(("replica", "dp", "tp"), (2, 2, 2))
    assert list(part.slice(tp=1)) == [10, 14, 18, 22]


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"gpu": ("dp", "tp"), "tp": 3}, ValueError),
        ({"gpu": ("dp", "tp"), "tp": 0}, ValueError),
        ({"gpu": ("dp", "tp")}, ValueError),
        ({"gpu": ("dp", "tp"), "dp": 2, "tp": 2}, ValueError),
        ({"gpu": ("host", "tp"), "tp": 2}, ValueError),
        ({"gpu": ("dp", "tp"), "tp": 2, "pp": 2}, TypeError),
        ({"node": ("dp", "tp"), "tp": 2}, TypeError),
    ],
)
def test_a_split_that_does_not_fit_is_refused(parts: dict[str, int | tuple[str, ...]], error: type[Exception]) -> None:
    with pytest.raises(error):
        MESH.region.split(**parts)


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        MESH.region.rename(gpu="host")
