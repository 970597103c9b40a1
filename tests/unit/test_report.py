"""The report is one file that loads nothing, says what the manifests say, and renders in a browser without complaint."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_output import MADE_UP, SyntheticOutput, write_finished

from headframe_worker.documents import read_shard_manifest
from headframe_worker.finalize.report.charts import area_chart
from headframe_worker.finalize.report.runs import add_runs, throughput
from testbed.tools import require, system_tool


def finished(directory: Path, **options: object) -> tuple[SyntheticOutput, str]:
    output = write_finished(directory, **options)
    return output, (output.directory / "report.html").read_text()


class _Text(HTMLParser):
    """Collects a page's visible text, and the elements that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.loads: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._hidden += tag == "style"
        self.loads += [
            f"{tag} {name}={value}"
            for name, value in attributes
            if tag == "script" or (name in ("src", "href", "xlink:href") and value != "data:,")
        ]

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag == "style"

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text.append(data)


def parsed(html: str) -> tuple[str, list[str]]:
    parser = _Text()
    parser.feed(html)
    return re.sub(r"\s+", " ", " ".join(parser.text)), parser.loads


def test_it_loads_nothing_and_says_what_the_manifest_says(tmp_path: Path) -> None:
    _, html = finished(tmp_path)
    text, loads = parsed(html)
    assert loads == []
    assert "url(" not in html
    assert "://" not in html
    for expected in (
        "made/up",
        "59",
        "of 61 rows",
        "InvalidJson",
        "NonFinite",
        "--target-layer-ids 0 2 5",
        "layer.4",
        "2.15.0",
    ):
        assert expected in text


def test_what_users_named_is_text_and_never_markup(tmp_path: Path) -> None:
    source = "a/<script>alert(1)</script>"
    _, html = finished(tmp_path, model=MADE_UP.model_copy(update={"source": source}))
    assert "<script" not in html
    assert source in parsed(html)[0]


def test_empty_shards_have_a_report_too(tmp_path: Path) -> None:
    _, html = finished(tmp_path, lengths=[1] * 20, shards=30)
    assert "median 1," in parsed(html)[0]


def test_the_curve_holds_every_token_of_every_process(tmp_path: Path) -> None:
    """The area under the curve of tokens per second is the number of tokens, with two processes a minute apart."""
    output, _ = finished(tmp_path)
    totals = add_runs(read_shard_manifest(output.store, shard.index) for shard in output.plan.shards)
    points = throughput(totals)
    assert points[-1][0] == pytest.approx(70.0)
    inner = points[1:-1]
    width = points[-1][0] / len(inner)
    stretched = sum(tokens for *_, tokens in totals.stretches)
    assert sum(rate * width for _, rate in inner) == pytest.approx(stretched)
    assert min(rate for _, rate in inner) == 0  # between the two


def test_a_chart_speaks_to_those_who_do_not_see_it() -> None:
    svg = area_chart([(0, 0), (1, 5)], label="Speed <over> time", x_unit="s")
    assert 'role="img" aria-label="Speed &lt;over&gt; time"' in svg
    assert "1 s: 5" in svg


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_renders_in_a_browser_without_complaint(tmp_path: Path, scheme: str) -> None:
    with require():
        chromium = system_tool("chromium")
    output, _ = finished(tmp_path)
    picture = tmp_path / "page.png"
    result = subprocess.run(
        [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'browser'}",
            "--window-size=1180,2600",
            *(["--blink-settings=preferredColorScheme=0", "--force-dark-mode"] if scheme == "dark" else []),
            f"--screenshot={picture}",
            (output.directory / "report.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    assert "CONSOLE" not in result.stderr, result.stderr
    # An empty page of this size compresses to a few kilobytes.
    assert picture.stat().st_size > 60_000


def test_a_browser_reports_a_broken_page(tmp_path: Path) -> None:
    """The check above can fail: a page that loads what its policy forbids is complained about."""
    with require():
        chromium = system_tool("chromium")
    _, html = finished(tmp_path)
    page = tmp_path / "broken.html"
    page.write_text(html.replace("</main>", "<script>undefined_function()</script></main>"))
    result = subprocess.run(
        [
            chromium,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'browser'}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    assert "CONSOLE" in result.stderr
