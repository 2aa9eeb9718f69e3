"""`funcacc bench`, on the smallest work: its figures are those of runs that took place."""

import json

from funcacc.bench import compare
from funcacc.bench.compare import Row, markdown
from funcacc.cli import main


def test_bench_compares_processes_and_writes_tables(tmp_path, capsys):
    asked = "--work small-mlp --microbatches 2 --peers eager --rounds 2 --seconds 0.01"
    assert main(["bench", *asked.split(), "--out", str(tmp_path)]) == 0
    ours, plain = json.loads((tmp_path / "bench.json").read_text())
    assert [ours["peer"], plain["peer"]] == ["funcacc", "eager"]
    assert ours["failure"] == plain["failure"] == ""
    # One for the step, whatever its learning rate and the length of its window; one copies the
    # state into buffers of its own.
    assert ours["programs"] == 2
    assert ours["instructions"] > 100
    assert 0 < ours["program_bytes"] < ours["peak_bytes"]
    assert ours["ratio"] == 1
    assert plain["programs"] is plain["program_bytes"] is None
    assert plain["step"][1] > 0
    table = (tmp_path / "bench.md").read_text()
    assert table in capsys.readouterr().out
    assert table.count("\n| 2 | ") == 2
    assert (tmp_path / "bench.svg").read_text().count("small-mlp") >= 1


def test_a_peer_that_fails_is_a_row_that_says_why():
    made = {
        "funcacc": compare.commands("small-mlp", 1, ["eager"], {})["eager"],
        "broken": ["python", "-c", "raise ValueError('no such device')"],
    }
    ours, broken = compare.compare("small-mlp", 1, made, rounds=1, seconds=0.01)
    assert not ours.failure
    assert broken.failure == "ValueError: no such device"
    assert "fails: ValueError: no such device" in markdown([broken])


def test_ratios_are_funcaccs_time_by_the_peers():
    row = Row("small-mlp", 4, "slow", step=(1.0, 2.0, 3.0), ratio=0.25)
    assert "| 4 | slow | 2.00 | 1.00 to 3.00 | 0.25 |" in markdown([row])
