"""Hostlists are read as Slurm reads them, and written so that Slurm reads the same names back."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_ft.errors import HostlistError
from slurm_ft.slurm.hostlist import MAX_HOSTS, compress, expand

SCONTROL = shutil.which("scontrol")
needs_scontrol = pytest.mark.skipif(SCONTROL is None, reason="scontrol is not installed here")

Ask = Callable[[Sequence[str]], list[list[str]]]


@pytest.fixture(scope="module")
def slurm_names(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """What `scontrol show hostnames` says of many lists, with one process: a marker host follows each list."""
    conf: Path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=unit\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=all Nodes=ALL\n")
    environ = {**os.environ, "SLURM_CONF": str(conf), "LC_ALL": "C"}

    def ask(lists: Sequence[str]) -> list[list[str]]:
        text = ",".join(f"{each},END" for each in lists)
        argv = [str(SCONTROL), "show", "hostnames", text]
        said = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True).stdout.split()
        groups: list[list[str]] = [[]]
        for name in said:
            groups[-1].append(name)
            if name == "END":
                groups[-1].pop()
                groups.append([])
        return groups[:-1]

    return ask


# Names as sites give them: text, then often a number, sometimes padded, sometimes with text after it.
stems = st.text("abxyz.-_", min_size=1, max_size=5).filter(lambda stem: not stem.startswith("-"))
numbers = st.one_of(st.integers(0, 120).map(str), st.from_regex(r"0{0,3}[0-9]{1,3}", fullmatch=True))
names = st.one_of(
    stems,
    st.builds("{}{}".format, stems, numbers),
    st.builds("{}{}-{}".format, stems, numbers, numbers),
    st.builds("{}{}-ib".format, stems, numbers),
    numbers,
)
# Neighbours are likely, so that ranges form.
runs = st.builds(
    lambda stem, low, count, width: [f"{stem}{low + step:0{width}d}" for step in range(count)],
    stems,
    st.integers(0, 1100),
    st.integers(1, 12),
    st.integers(1, 5),
)
name_lists = st.lists(st.one_of(runs, names.map(lambda name: [name])), max_size=8).map(
    lambda parts: [name for part in parts for name in part]
)


@st.composite
def groups(draw: st.DrawFn) -> str:
    items = []
    for _ in range(draw(st.integers(1, 3))):
        low, more, width = draw(st.integers(0, 1005)), draw(st.integers(0, 6)), draw(st.integers(1, 4))
        items.append(f"{low:0{width}d}-{low + more}" if more else f"{low:0{width}d}")
    return "[" + ",".join(items) + "]"


# What Slurm 22.05 reads: at most two groups in its documented order, and no text after the last one.
slurm_parts = st.one_of(
    names,
    st.builds("{}{}".format, stems, groups()),
    st.builds("{}{}{}{}".format, stems, groups(), stems, groups()),
    st.builds("{}{}{}".format, stems, groups(), groups()),
)
separators = st.sampled_from([",", ",,", ", ", " "])


@st.composite
def hostlists(draw: st.DrawFn) -> str:
    parts = draw(st.lists(slurm_parts, min_size=1, max_size=4))
    return "".join(part + draw(separators) for part in parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # RW-27: plain and bracketed names in one list
        ("fast-a,rack[003,007],tail-b", "fast-a rack003 rack007 tail-b"),
        ("blk1n[0010,0011],blk2n0005,blk3n0007", "blk1n0010 blk1n0011 blk2n0005 blk3n0007"),
        # RW-33: several groups, text after a group, unequal padding
        ("node[001-003,010]", "node001 node002 node003 node010"),
        ("gpu-[1-2]-[01-03]", "gpu-1-01 gpu-1-02 gpu-1-03 gpu-2-01 gpu-2-02 gpu-2-03"),
        ("r[0-1]b[0-1]-ib", "r0b0-ib r0b1-ib r1b0-ib r1b1-ib"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[098-102]", "n098 n099 n100 n101 n102"),
        ("c[0-1]s[0-1]n[0-1]", "c0s0n0 c0s0n1 c0s1n0 c0s1n1 c1s0n0 c1s0n1 c1s1n0 c1s1n1"),
        ("[1-2]", "1 2"),
        ("a[3,1-2,1]", "a3 a1 a2 a1"),
        (" a,, b ,\n c[1-2]", "a b c1 c2"),
        ("", ""),
        (" , ", ""),
    ],
)
def test_rw27_rw33_a_list_is_cut_at_top_level_commas_and_each_part_expanded(text: str, expected: str) -> None:
    assert expand(text) == expected.split()


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("a[1-2", 2, "never closed"),
        ("a,b1-2]", 7, "never opened"),
        ("a[1-[2]]", 5, "inside brackets"),
        ("ok,a[7-3]", 6, "runs down"),
        ("a[]", 3, "missing"),
        ("a[1,,2]", 5, "missing"),
        ("a[1-]", 3, "'1-'"),
        ("a[x]", 3, "'x'"),
        ("a[1, 2]", 5, "' 2'"),
        ("a[1-2-3]", 3, "'1-2-3'"),
        ("a[١]", 3, "neither a number"),
        ("a[1234567890123456789]", 3, "neither a number"),
    ],
)
def test_rw33_a_list_that_is_wrong_is_refused_with_its_text_the_place_and_a_hint(
    text: str, place: int, what: str
) -> None:
    with pytest.raises(HostlistError) as caught:
        expand(text)
    assert repr(text) in caught.value.message
    assert f"at character {place}:" in caught.value.message
    assert what in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "text", ["a[1-65537]", "a[0-999999999999]", "a[1-300]b[1-300]", "a[1-9999]" * 9, "a[1-40000],b[1-40000]"]
)
def test_a_typing_error_that_means_a_million_hosts_is_refused_before_it_eats_memory(text: str) -> None:
    with pytest.raises(HostlistError, match="the limit is 65,536"):
        expand(text)


def test_as_many_hosts_as_the_limit_allows_make_the_round_trip() -> None:
    hosts = expand(f"n[1-{MAX_HOSTS}]")
    assert len(hosts) == MAX_HOSTS
    assert compress(hosts) == f"n[1-{MAX_HOSTS}]"


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("n1 n2 n3 n7", "n[1-3,7]"),
        ("n08 n09 n10", "n[08-10]"),
        ("n8 n9 n10", "n[8-10]"),
        ("n9 n010", "n[9,010]"),
        ("n99 n100", "n[99-100]"),
        ("n1 m1 n2", "n1,m1,n2"),
        ("n3 n2 n2", "n[3,2,2]"),
        ("a a1 a", "a,a1,a"),
        ("r0b0-ib r0b1-ib", "r0b0-ib,r0b1-ib"),
        ("", ""),
    ],
)
def test_neighbours_are_joined_and_order_and_repeats_are_kept(hosts: str, expected: str) -> None:
    assert compress(hosts.split()) == expected


@pytest.mark.parametrize("name", ["", "a,b", "a b", "a[1]", "a\n", "a]"])
def test_a_name_that_a_hostlist_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(HostlistError, match="Name 2 of 2"):
        compress(["ok", name])


@settings(max_examples=50)
@given(name_lists)
def test_names_written_as_a_hostlist_are_read_back_in_order(hosts: list[str]) -> None:
    assert expand(compress(hosts)) == hosts


@given(st.lists(st.text(min_size=1).filter(lambda name: not set(name) & set("[], \t\r\n"))))
def test_any_text_without_blanks_commas_and_brackets_makes_the_round_trip(hosts: list[str]) -> None:
    assert expand(compress(hosts)) == hosts


@given(st.text("a0129-,[] ", max_size=20))
def test_any_text_is_read_or_refused_and_nothing_else(text: str) -> None:
    try:
        hosts = expand(text)
    except HostlistError:
        return
    assert expand(compress(hosts)) == hosts


@needs_scontrol
@settings(max_examples=12, deadline=None)
@given(texts=st.lists(hostlists(), min_size=10, max_size=60))
def test_rw33_slurm_reads_a_hostlist_as_the_same_names(slurm_names: Ask, texts: list[str]) -> None:
    assert [expand(text) for text in texts] == slurm_names(texts)


@needs_scontrol
@settings(max_examples=12, deadline=None)
@given(lists=st.lists(name_lists, min_size=10, max_size=60))
def test_slurm_reads_what_compress_writes_as_the_same_names_in_order(slurm_names: Ask, lists: list[list[str]]) -> None:
    assert slurm_names([compress(hosts) for hosts in lists]) == lists
