"""`evisrag probe`: a run with the bundled model, and what is refused."""

from evisrag_jax.cli.main import main
from evisrag_jax.runtime.json_files import read_json, read_jsonl


def test_the_bundled_model(tmp_path, capsys):
    """Evidence matters more than other regions and than anything on blank pages; a second call asks
    nothing and writes the same."""
    words = ["probe", "ced", "--out", str(tmp_path / "run"), "--config.data.questions=12"]
    words += ["--config.group=2", "--config.perturb=False"]
    assert main(words) == 0
    table = capsys.readouterr().out
    assert "relevant" not in table and "evidence" in table and "blindfold" in table
    summary = read_json(tmp_path / "run" / "summary.json")
    found = summary["proposals"]
    assert found["evidence"]["rate"] >= 0.75 > found["random"]["rate"]
    assert found["blindfold"]["rate"] <= 0.5 and abs(found["blindfold"]["m"]) < 1e-3
    assert found["evidence"]["m"] > found["random"]["m"] + 0.3
    assert (tmp_path / "run" / "ced.png").stat().st_size > 1000
    assert len(list((tmp_path / "run" / "regions").glob("*.png"))) == 3
    rows = list(read_jsonl(tmp_path / "run" / "ced.jsonl"))
    assert len(rows) == 2 * summary["questions"]
    before = (tmp_path / "run" / "ced.jsonl").read_bytes()
    assert main(words) == 0
    assert (tmp_path / "run" / "ced.jsonl").read_bytes() == before
    assert read_json(tmp_path / "run" / "summary.json")["proposals"] == found


def test_refusals(tmp_path, refused):
    refused(["probe", "--out", "x"], "probe takes one of ced and then flags; got None")
    refused(["probe", "cde", "--out", "x"], "probe takes one of ced and then flags; got 'cde'")
    refused(["probe", "ced"], "probe ced needs --out DIR")
    refused(["probe", "ced", "--out", "x", "--config.scope=y"], "scope='y'; one of records")
