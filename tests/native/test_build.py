"""What is built where, and that a missing compiler or header never fails an install unless it was asked to."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.native import workshop

build = workshop.build


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def hip(root: Path, major: int, minor: int) -> str:
    text = f"#define HIP_VERSION_MAJOR {major}\n#define HIP_VERSION_MINOR {minor}\n"
    return str(put(root / "include/hip/hip_version.h", text).parents[2])


def plan(environ: dict[str, str]) -> dict[str, str]:
    return {library.platform: library.missing for library in build.libraries(environ)}


def test_headers_decide_what_is_built(tmp_path: Path) -> None:
    put(tmp_path / "cuda/include/cuda.h")
    environ = {"CUDA_HOME": str(tmp_path / "cuda"), "ROCM_PATH": hip(tmp_path / "rocm", 7, 2)}
    assert plan(environ) == {"host": "", "cuda": "", "rocm": ""}
    by_name = {library.platform: library for library in build.libraries(environ)}
    assert str(tmp_path / "rocm/include") in by_name["rocm"].arguments
    assert "-DUSE_ROCM" in by_name["rocm"].arguments and "-DUSE_ROCM" not in by_name["cuda"].arguments


def test_old_hip_headers_are_refused_with_their_version(tmp_path: Path) -> None:
    include, why = build.hip_include({"ROCM_PATH": hip(tmp_path, 6, 4)})
    if include is not None:
        pytest.skip("this machine has newer HIP headers in a usual place")
    assert "6.4" in why or "are of" in why


def test_old_headers_do_not_hide_newer_ones(tmp_path: Path) -> None:
    environ = {"ROCM_PATH": hip(tmp_path / "old", 5, 2), "HIP_PATH": hip(tmp_path / "new", 7, 0)}
    assert build.hip_include(environ) == (tmp_path / "new/include", "")


@pytest.mark.parametrize(
    ("word", "chosen"),
    [
        ("auto", ("host", "cuda", "rocm")),
        ("", ("host", "cuda", "rocm")),
        ("host", ("host",)),
        ("rocm", ("host", "rocm")),
        ("ROCM, cuda", ("host", "cuda", "rocm")),
    ],
)
def test_gpu_platform_restricts(word: str, chosen: tuple[str, ...]) -> None:
    assert build.chosen_platforms({"GPU_PLATFORM": word}) == chosen


def test_unknown_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="GPU_PLATFORM=vulkan"):
        build.chosen_platforms({"GPU_PLATFORM": "vulkan"})
    with pytest.raises(build.BuildError, match="SLURM_FT_NATIVE=maybe"):
        build.build(tmp_path, {"SLURM_FT_NATIVE": "maybe"})


def test_without_a_compiler_auto_says_so_and_required_fails(tmp_path: Path) -> None:
    stale = put(tmp_path / build.file_name("host"))
    words: list[str] = []
    assert build.build(tmp_path, {"CXX": "no-such-compiler", "PATH": ""}, words.append) == []
    assert words == ["native libraries: no C++ compiler (CXX, g++)"]
    assert not stale.exists(), "a library of an earlier build would get into the wheel"
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.build(tmp_path, {"CXX": "no-such-compiler", "PATH": "", "SLURM_FT_NATIVE": "required"})


def test_a_compiler_that_fails_or_cannot_run_is_no_end_in_auto(tmp_path: Path) -> None:
    compiler = put(tmp_path / "cxx", "#!/bin/sh\necho 'cannot do it' >&2\nexit 3\n")
    compiler.chmod(0o755)
    words: list[str] = []
    environ = {"CXX": str(compiler), "GPU_PLATFORM": "host", "PATH": os.environ["PATH"]}
    assert build.build(tmp_path / "lib", environ, words.append) == []
    assert "not built" in words[0] and "cannot do it" in words[0]
    assert list((tmp_path / "lib").iterdir()) == []
    with pytest.raises(build.BuildError, match="cannot do it"):
        build.build(tmp_path / "lib", {**environ, "SLURM_FT_NATIVE": "required"}, words.append)


def test_required_wants_the_platforms_that_were_named(tmp_path: Path) -> None:
    compiler = put(tmp_path / "cxx", '#!/bin/sh\nfor last; do :; done\n: > "$last"\n')
    compiler.chmod(0o755)
    environ = {"CXX": str(compiler), "SLURM_FT_NATIVE": "required", "PATH": os.environ["PATH"]}
    if build.hip_include(environ)[0] is not None:
        pytest.skip("this machine has HIP headers")
    quiet = [].append  # type: ignore[var-annotated]
    assert tmp_path / "lib" / build.file_name("host") in build.build(tmp_path / "lib", environ, quiet)
    with pytest.raises(build.BuildError, match="HIP headers"):
        build.build(tmp_path / "lib", {**environ, "GPU_PLATFORM": "rocm"}, quiet)


def test_off_builds_nothing(tmp_path: Path) -> None:
    assert build.build(tmp_path, {"SLURM_FT_NATIVE": "off"}, lambda text: None) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a wheel is made from, without the rest of the repository."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    place = tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "lib", "*.so")
    for name in ("slurm_ft", "native"):
        shutil.copytree(workshop.ROOT / name, place / name, ignore=ignore)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(workshop.ROOT / name, place / name)
    return place


def wheel(tree: Path, **environ: str) -> zipfile.ZipFile:
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "-d", "made"]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, **environ}, capture_output=True, text=True, timeout=workshop.LIMIT
    )
    assert done.returncode == 0, done.stderr
    (path,) = (tree / "made").iterdir()
    return zipfile.ZipFile(path)


@pytest.mark.filterwarnings("ignore")
def test_a_wheel_holds_the_library_for_any_python(tree: Path) -> None:
    quick = put(tree / "cxx", f'#!/bin/sh\nexec {workshop.compiler()} "$@" -O0\n')
    quick.chmod(0o755)
    with wheel(tree, GPU_PLATFORM="host", SLURM_FT_NATIVE="required", CXX=str(quick)) as made:
        assert "-py3-none-linux_" in str(made.filename)
        names = made.namelist()
        assert "slurm_ft/native/lib/libslurm_ft_host.so" in names
        assert not [name for name in names if name.startswith(("native/", "slurm_ft/native/src"))]


@pytest.mark.filterwarnings("ignore")
def test_a_wheel_without_a_compiler_is_pure_and_whole(tree: Path) -> None:
    stale = put(tree / "build/lib/slurm_ft/native/lib/libslurm_ft_host.so", "stale")
    assert stale.exists()
    with wheel(tree, CXX="no-such-compiler") as made:
        assert made.filename is not None and made.filename.endswith("-py3-none-any.whl")
        assert "slurm_ft/native/library.py" in made.namelist()
        assert not [name for name in made.namelist() if name.endswith(".so")]


@pytest.mark.parametrize("platform", ["host", "cuda", "rocm"])
def test_the_sources_are_in_the_projects_format(platform: str) -> None:
    program = shutil.which("clang-format") or shutil.which("clang-format", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("clang-format is not installed")
    sources = [workshop.NATIVE / source for source in build.SOURCES[platform] if not source.startswith("hip/")]
    sources += sorted((workshop.NATIVE / "src").glob("*.h")) + sorted((workshop.NATIVE / "tests").glob("*.cpp"))
    sources += sorted((workshop.NATIVE / "fake").glob("*.*"))
    done = subprocess.run([program, "--dry-run", "-Werror", *sources], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
