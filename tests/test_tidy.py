"""Rules of the repository itself: what a reviewer would have to look for again each time.

Only files that git knows (or would add) are looked at.
"""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tidewater_core.crd.manifest import load_manifests

ROOT = Path(__file__).resolve().parents[1]
COMPONENTS = ("core", "coordination", "worker", "operator", "pipeline", "client")
MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70

REGISTRY_HOST = re.compile(
    r"\b(docker\.io|ghcr\.io|gcr\.io|quay\.io|registry\.k8s\.io|mcr\.microsoft\.com|"
    r"public\.ecr\.aws|(files|test)\.pythonhosted\.org|registry\.npmjs\.org|"
    r"repo1?\.maven(\.apache)?\.org)\b"
)
MACHINE_PATH = re.compile(r"(?<![\w.$}/])/(work|root|home/(?!nonroot\b)\w+|Users|opt/wheels)/\w")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
MARKDOWN_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@cache
def files() -> tuple[Path, ...]:
    """Return the files of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return tuple(sorted(p for n in listed.split("\0") if n and (p := ROOT / n).is_file()))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def texts() -> Iterator[tuple[str, str]]:
    """Yield every text file but this one, which must name what it forbids."""
    for path in files():
        if path != Path(__file__).resolve():
            try:
                yield name(path), path.read_text()
            except UnicodeDecodeError:
                continue


def python_files() -> list[Path]:
    return [path for path in files() if path.suffix == ".py"]


def lines_that_match(pattern: re.Pattern[str], *skip: str) -> list[str]:
    return [
        f"{file}:{number}: {line.strip()[:120]}"
        for file, text in texts()
        if not file.startswith(skip)
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def test_modules_are_short() -> None:
    long = {
        name(path): count
        for path in python_files()
        if (count := len(path.read_text().splitlines())) > MODULE_LINES_MAX
    }
    assert long == {}, f"a module has at most {MODULE_LINES_MAX} lines"


def test_functions_are_short() -> None:
    long = [
        f"{name(path)}:{node.lineno} {node.name}: {length} lines"
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := _own_lines(node)) > FUNCTION_LINES_MAX
    ]
    assert long == [], f"a function has at most {FUNCTION_LINES_MAX} lines"


def _own_lines(node: ast.stmt) -> int:
    """Count the lines of a definition without those of the definitions inside it."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    inside = [inner for inner in getattr(node, "body", []) if isinstance(inner, kinds)]
    return (node.end_lineno or 0) - node.lineno + 1 - sum(map(_all_lines, inside))


def _all_lines(node: ast.stmt) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def test_nothing_is_unfinished() -> None:
    assert lines_that_match(UNFINISHED, "LICENSE", "requirements/") == []


def test_no_registry_is_named() -> None:
    """Where packages come from is a matter of each machine.

    What an image is made of and which images a cluster runs has to be named somewhere: there.
    """
    assert lines_that_match(REGISTRY_HOST, "Dockerfile.", "e2e/", "charts/") == []


def test_no_path_of_a_machine_is_named() -> None:
    assert lines_that_match(MACHINE_PATH, "LICENSE") == []


def test_no_lock_files() -> None:
    """They record download addresses; requirements/*.txt have versions and hashes."""
    locks = {"uv.lock", "poetry.lock", "Pipfile.lock", "pdm.lock", "pylock.toml"}
    assert [name(path) for path in files() if path.name in locks] == []


def test_no_python_in_a_component_outside_src() -> None:
    """`operator/x.py` would shadow the standard library's `operator`."""
    wrong = [
        name(path)
        for path in python_files()
        if (parts := path.relative_to(ROOT).parts)[0] in COMPONENTS and parts[1] != "src"
    ]
    assert wrong == []


def test_tests_are_no_packages() -> None:
    packages = [
        name(path)
        for path in python_files()
        if path.name == "__init__.py" and name(path).startswith(("tests/", "e2e/"))
        if not name(path).startswith("tests/lib/")
    ]
    assert packages == []


def test_no_grab_bags() -> None:
    bags = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}
    assert [name(path) for path in python_files() if path.name in bags] == []


def test_no_test_is_skipped() -> None:
    """A test that needs a real part starts the real part."""
    skip = re.compile(r"pytest\.(mark\.)?(skip|skipif|importorskip|xfail)\b")
    found = [line for line in lines_that_match(skip) if line.split(":")[0].endswith(".py")]
    assert found == []


def test_components_have_one_version() -> None:
    projects = [
        tomllib.loads((ROOT / component / "pyproject.toml").read_text())["project"]
        for component in COMPONENTS
    ]
    assert len({project["version"] for project in projects}) == 1
    version = projects[0]["version"]
    ours = [d for project in projects for d in project["dependencies"] if "tidewater" in d]
    assert set(ours) == {f"tidewater-{name}=={version}" for name in ("core", "coordination")}
    assert {project["requires-python"] for project in projects} == {">=3.11"}


@pytest.mark.parametrize("component", COMPONENTS)
def test_imports_are_declared(component: str) -> None:
    """What comes along with another package today may not tomorrow."""
    project = tomllib.loads((ROOT / component / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    declared = {_normal(requirement) for group in groups for requirement in group}
    owners = packages_distributions()
    undeclared = {
        f"{name(path)}: {module}"
        for path in python_files()
        if path.is_relative_to(ROOT / component)
        for module in _imported(path)
        if module in owners
        and not {_normal(owner) for owner in owners[module]}
        & (declared | {_normal(project["name"])})
    }
    assert undeclared == set()


def _normal(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement)[0].lower().replace("_", "-")


def _imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    parts = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {module.split(".")[0] for module in plain | parts}


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.in")), ids=name)
def test_requirements_are_pinned(path: Path) -> None:
    if path.name == "constraints.in":
        return
    pinned = path.with_suffix(".txt").read_text()
    assert "--hash=sha256:" in pinned
    assert re.search(r"--(extra-)?index-url|--find-links|https?://", pinned) is None
    loose = [
        line
        for line in pinned.splitlines()
        if line and line[0] not in " #" and not re.match(r"[\w.-]+(\[[\w,]+\])?==\S+", line)
    ]
    assert loose == [], f"{path.name}: run `make pins`"


def test_requirements_agree_on_versions() -> None:
    """What is tested is what is shipped."""
    dev = set(_pins("dev"))
    for component in ("worker", "client", "operator", "pipeline"):
        assert set(_pins(component)) <= dev, f"requirements/{component}.txt: run `make pins`"


def _pins(which: str) -> list[str]:
    text = (ROOT / "requirements" / f"{which}.txt").read_text()
    return re.findall(r"^([\w.-]+==\S+)", text, re.MULTILINE)


def test_every_make_target_is_documented() -> None:
    """A target without `## text` is one that nobody finds."""
    makefiles = [ROOT / "Makefile", *sorted((ROOT / "mk").glob("*.mk"))]
    undocumented = [
        f"{name(path)}: {target}"
        for path in makefiles
        for target, rest in re.findall(
            r"^([a-zA-Z0-9_-]+(?: [a-zA-Z0-9_-]+)*):(?!=)(.*)$", path.read_text(), re.MULTILINE
        )
        if "## " not in rest
    ]
    assert undocumented == []


@pytest.mark.parametrize("path", [p for p in files() if p.suffix == ".md"], ids=name)
def test_links_of_pages_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    dead = [
        target
        for target in MARKDOWN_LINK.findall(text)
        if not re.match(r"[a-z]+:", target) and not target.startswith("#")
        if not (path.parent / target.split("#")[0]).exists()
    ]
    assert dead == []


def _anchors(page: Path) -> set[str]:
    """Return what a link may name in a page, by GitHub's rule."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).strip().lower() for head in heads]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


def test_links_into_pages_name_a_heading() -> None:
    dead = []
    for page in (path for path in files() if path.suffix == ".md"):
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in MARKDOWN_LINK.findall(text):
            place, _, anchor = target.partition("#")
            there = page.parent / place if place else page
            if anchor and ":" not in place and there.suffix == ".md":
                dead += [f"{name(page)}: {target}"] if anchor not in _anchors(there) else []
    assert dead == []


def test_manifests_in_pages_are_valid() -> None:
    """A reader copies them as they are."""
    for path in files():
        if path.suffix == ".md":
            for block in re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL):
                if "apiVersion: tidewater.dev/" in block:
                    assert load_manifests(block), name(path)


def _pytest_commands(page: str) -> list[tuple[str, str]]:
    """Return the files and the words of `-k` of each command in a page."""
    found = [each.partition(" -k ") for each in re.findall(r"`pytest ([^`]*)`", page)]
    return [(files.strip(), words) for files, _, words in found]


def test_tests_of_the_track_record_are_there() -> None:
    """A fault that no test finds again may come back."""
    lost = []
    for files, words in _pytest_commands((ROOT / "docs/track-record.md").read_text()):
        paths = [ROOT / each.partition("::")[0] for each in files.split() if each[0] != "-"]
        lost += [name(path) for path in paths if not path.exists()]
        sources = [f for path in paths for f in ([path] if path.is_file() else path.rglob("*.py"))]
        text = "\n".join(source.read_text() for source in sources if source.exists())
        # Names of functions and ids of parameters; `5-60` is made of two of the latter.
        sought = set(re.findall(r"[\w-]+", words)) - {"or", "and", "not"}
        lost += [
            f"{word} in {files}"
            for word in sorted(sought)
            if word not in text and not all(part in text for part in word.split("-"))
        ]
    assert lost == []


def test_reasons_and_metrics_of_the_troubleshooting_page_exist() -> None:
    """Who looks for what an error says finds it in the code, or it is Kubernetes' own."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    sources = [p for p in files() if p.suffix == ".py" and "src" in p.relative_to(ROOT).parts]
    code = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w+|tidewater_[a-z_]+)[`{]", page))
    assert len(named) > 100
    assert named - code == {"ImagePullBackOff", "CrashLoopBackOff"}


def test_text_files_end_with_one_newline() -> None:
    wrong = [
        file
        for file, text in texts()
        if text and (not text.endswith("\n") or text.endswith("\n\n"))
        if not file.startswith("LICENSE")
    ]
    assert wrong == []
