"""What the pages tell a newcomer to do can be done: links lead somewhere, commands and their flags exist, fragments are valid."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from headframe_api.spec import ExtractionJobSpec
from headframe_worker.cli.main import app
from testbed.helm import CHART, ROOT, render_text
from testbed.tools import go_tool, require

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), CHART / "README.md"]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]+)?\)")
COMMAND = re.compile(r"^ {4,}(.+)$|`((?:headframe|make|helm) [^`]+)`", re.MULTILINE)
ENOUGH = {"model": {"source": "org/model"}, "dataset": {"source": "org/data"}, "output": {"uri": "s3://bucket/prefix"}}


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(program: str) -> Iterator[tuple[Path, list[str]]]:
    """Each command of a program that a page shows, in words, without its comment; lines that end in a backslash are joined."""
    for page in PAGES:
        for found in COMMAND.finditer(page.read_text().replace("\\\n", " ")):
            for command in re.split(r" && | \| ", found[1] or found[2]):
                if command.split()[:1] == [program]:
                    yield page, shlex.split(command, comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}{anchor}"


def test_the_commands_of_headframe_exist() -> None:
    group: Any = get_command(app)
    shown = list(commands("headframe"))
    assert len(shown) > 10
    for page, (_, name, *words) in shown:
        known = {option for parameter in group.commands[name].params for option in parameter.opts} | {"--help"}
        flags = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert flags <= known, f"{page.name}: headframe {name} {' '.join(words)}"


def test_the_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {words[1] for _, words in commands("make")}
    assert shown
    assert shown <= targets


def test_the_values_that_commands_set_exist() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    settings = [
        part.partition("=")[0]
        for _, words in commands("helm")
        for flag, setting in zip(words, [*words[1:], ""], strict=True)
        if flag == "--set"
        for part in setting.split(",")
    ]
    assert settings
    for setting in settings:
        node = values
        for key in setting.split("."):
            assert key in node, setting
            node = node[key]


def test_fragments_of_recipes_are_valid(tmp_path: Path) -> None:
    """Each is a part of `spec`, of the chart's values, or of the metadata of an ExtractionJob."""
    with require():
        go_tool("helm")
    text = (ROOT / "docs/recipes.md").read_text()
    fragments = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    fields = {field.alias or name for name, field in ExtractionJobSpec.model_fields.items()}
    assert fragments
    for fragment in fragments:
        if set(fragment) <= fields:
            ExtractionJobSpec.model_validate({**ENOUGH, **fragment})
        elif set(fragment) != {"metadata"}:
            (tmp_path / "values.yaml").write_text(yaml.safe_dump(fragment))
            render_text("--values", tmp_path / "values.yaml")
