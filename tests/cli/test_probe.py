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
    assert "rate" in table and "evidence" in table and "blindfold" in table
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


def test_controls_as_dark_as_the_evidence(tmp_path):
    """Rows of text against other text: the evidence still matters more."""
    words = ["probe", "ced", "--out", str(tmp_path / "run"), "--config.data.questions=6"]
    words += ["--config.group=1", "--config.perturb=False", "--config.blindfold=False"]
    assert main([*words, "--config.ced.region.match_ink=True"]) == 0
    found = read_json(tmp_path / "run" / "summary.json")["proposals"]
    assert set(found) == {"evidence", "random"} and found["evidence"]["rate"] >= 0.75


def test_attention_of_the_bundled_model(tmp_path, capsys):
    """Writing the evidence the model looks at it more than its share of the page in some layer; the
    margins beside it are those of the other probe."""
    words = ["probe", "attention", "--out", str(tmp_path / "run"), "--config.data.questions=8"]
    words += ["--config.group=2", "--config.row=predicting"]
    assert main(words) == 0
    assert "lift~margin" in capsys.readouterr().out
    summary = read_json(tmp_path / "run" / "summary.json")
    assert list(summary["scopes"]) == ["all", "observe", "evidence", "think", "answer"]
    evidence = summary["scopes"]["evidence"]
    assert max(evidence["rho_by_layer"]) > 2 * summary["box_share"]
    assert evidence["rho"]["low"] <= evidence["rho"]["mean"] <= evidence["rho"]["high"]
    rows = list(read_jsonl(tmp_path / "run" / "attention.jsonl"))
    assert len(rows) == 2 * summary["questions"] == summary["responses"]
    for row in rows:
        attention = row["attention"]
        assert attention["visual_tokens"] == 60 and 0 < attention["box_tokens"] <= 20
        assert attention["scopes"]["all"]["tokens"] >= attention["scopes"]["evidence"]["tokens"]
        audited = row["tokens"] > 0
        assert (row["margin"] is not None) == audited
    assert (tmp_path / "run" / "attention.png").stat().st_size > 1000
    before = (tmp_path / "run" / "attention.jsonl").read_bytes()
    assert main(words) == 0
    assert (tmp_path / "run" / "attention.jsonl").read_bytes() == before


def test_refusals(tmp_path, refused):
    refused(["probe", "--out", "x"], "probe takes one of ced, attention and then flags; got None")
    refused(
        ["probe", "cde", "--out", "x"],
        "probe takes one of ced, attention and then flags; got 'cde'",
    )
    refused(["probe", "ced"], "probe ced needs --out DIR")
    refused(["probe", "ced", "--out", "x", "--config.scope=y"], "scope='y'; one of records")
    refused(["probe", "attention", "--out", "x", "--config.row=y"], "row='y'; own or predicting")
    refused(
        ["probe", "ced", "--out", "x", "--config.pictures=-1"], "pictures=-1 must not be negative"
    )
