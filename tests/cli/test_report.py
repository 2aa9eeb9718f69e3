"""The page about a run: what is on it, and how a browser shows it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import image

from funcacc.cli import plot
from tests.cli.test_train import numbers, stop_after

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted and resumed, so that two programs were built."""
    from funcacc.cli import main
    from tests.cli.conftest import TINY

    folder = tmp_path_factory.mktemp("runs")
    data = folder / "text.txt"
    data.write_text("".join(f"line {i}: the cat sat on mat {i * i}\n" for i in range(200)))
    arguments = ["train", *TINY, "--data", str(data), "--out", str(folder / "a <b> run")]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(6, patch)
        assert main(arguments) == 130
    assert main([*arguments, "--resume"]) == 0
    torch.set_num_threads(threads)
    assert main(["report", str(folder / "a <b> run")]) == 0
    return folder / "a <b> run"


def curves_of(html: str) -> list[str]:
    found = re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", html)
    return [base64.b64decode(x).decode() for x in found]


def test_the_page_holds_everything_and_needs_nothing(made: Path) -> None:
    html = (made / "report.html").read_text()
    account = json.loads((made / "report.json").read_text())
    metrics = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    programs = [r for r in metrics if "program" in r]
    found = [(r["step"], r["program"]["reason"]) for r in programs]
    assert found == [(0, "first call"), (4, "first call")]
    assert len(numbers(made)) == 12 + 2
    for leaf in (*account["leaves"], *account["inside"]):
        path = leaf["path"].replace("'", "&#x27;")
        assert f"<code>{path}</code>" in html and f"<code>{leaf['spec']}</code>" in html
    assert "<title>funcacc: a &lt;b&gt; run</title>" in html
    assert html.count("<td>first call<td>traced<td class='n'>") == 2
    wide, narrow = curves_of(html)
    assert wide != narrow and all("<svg" in x for x in (wide, narrow))
    outside = re.sub(r"data:image/svg\+xml;base64,[\w+/=]+", "", html)
    assert "http" not in outside and "<script" not in outside and "url(" not in outside
    assert "data_sha256" in outside and "microbatches" in outside


def test_what_is_no_run_or_damaged_is_refused(run: Any, made: Path, tmp_path: Path) -> None:
    run("report", tmp_path / "none").assert_refused("holds no run of funcacc train")
    for name in ("report.json", "config.json"):
        copy = tmp_path / name
        shutil.copytree(made, copy)
        for text in ("", "[]", "[" * 100_000, '{"a": 1}', '{"leaves": 3}'):
            (copy / name).write_text(text)
            if name == "report.json" or not text.startswith("{"):
                run("report", copy).assert_refused(name)
        assert (copy / "report.html").read_bytes() == (made / "report.html").read_bytes()


def test_a_run_before_its_first_step_has_a_page(run: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    out = tmp_path / "page.html"
    assert run("report", tmp_path, "--out", out).code == 0
    assert "There is no report.json yet" in out.read_text()


def test_long_curves_keep_their_peaks() -> None:
    points = [(i, float(i == 777_777) - float(i == 222_222)) for i in range(1_000_000)]
    thin = plot.thinned(points)
    assert len(thin) <= plot.MOST_POINTS and {(777_777, 1.0), (222_222, -1.0)} < set(thin)
    assert plot.thinned(points[:100]) == points[:100]


def browse(page: Path, *options: str) -> str:
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    folder = f"--user-data-dir={page.parent / 'profile'}"
    done = subprocess.run(
        [*command, folder, "--virtual-time-budget=3000", *options, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ASK = """<script>addEventListener('load', () => {
  const out = {}, input = document.querySelector('input');
  const rows = document.querySelectorAll('.leaves tr');
  out.rows = rows.length;
  input.value = 'EXP_AVG_SQ'; input.dispatchEvent(new Event('input'));
  const shown = [...rows].filter(r => r.getClientRects().length);
  out.shown = shown.map(r => r.cells[0].textContent);
  out.said = input.nextElementSibling.textContent;
  input.value = ''; input.dispatchEvent(new Event('input'));
  const image = document.querySelector('img');
  out.image = [image.naturalWidth, image.getBoundingClientRect().width];
  out.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  out.bars = [...document.querySelectorAll('.bar')].map(b => [b.getBoundingClientRect().width,
    [...b.children].map(i => i.getBoundingClientRect().width)]);
  document.body.dataset.out = JSON.stringify(out);
})</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_a_browser_shows_it_in_wide_and_narrow_windows(made: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text((made / "report.html").read_text().replace("</body>", ASK + "</body>"))
    account = json.loads((made / "report.json").read_text())
    wanted = [x["path"] for x in account["leaves"] if "exp_avg_sq" in x["path"]]
    pictures = {}
    for width in (1200, 500):
        picture = tmp_path / f"{width}.png"
        options = (f"--window-size={width},1400", f"--screenshot={picture}", "--dump-dom")
        found = re.search(r'data-out="(.*?)">', browse(page, *options))
        assert found is not None
        seen = json.loads(found[1].replace("&quot;", '"'))
        assert seen["rows"] == len(account["leaves"]) + len(account["inside"])
        assert seen["shown"] == wanted and len(wanted) > 3
        assert seen["said"] == f"{len(wanted)} of {seen['rows']} leaves"
        assert seen["overflow"] == 0
        (whole, pieces), *others = seen["bars"]
        assert others == [] and sum(pieces) == pytest.approx(whole, abs=2)
        share = account["kinds"]["optimizer state"] / account["floor_bytes"]
        assert pieces[1] == pytest.approx(share * whole, abs=2)
        pictures[width] = seen["image"]
        pixels = image.imread(picture)[..., :3]
        assert pixels.shape[1] == width
        # Lines and bars are there: pixels that are neither white nor grey.
        assert np.count_nonzero(np.ptp(pixels, axis=2) > 0.3) > 2000
    # Each window has its own picture of the curves.
    assert pictures[1200][0] > 1.5 * pictures[500][0] and pictures[500][1] < 500
