"""What the soak test of resuming compares."""

import json

import soak_resume

from tests.training.test_loop import go


def test_equal_runs_have_no_difference_and_others_are_named(tmp_path):
    """Clock and caches are no difference; a metric, a record, a parameter and a lost row are."""
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        go(folder, 4)
        (folder / "rollouts").mkdir()
        (folder / "rollouts" / "step_000001.jsonl").write_text('{"step": 1, "id": "r1"}\n')
    assert soak_resume.last_step(a) == soak_resume.saved_step(a) == 4
    assert soak_resume.differences(a, b) == []

    (b / "rollouts" / "step_000001.jsonl").write_text('{"step": 1, "id": "r2"}\n')
    lines = (b / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[1])
    lines[1] = json.dumps(row | {"loss/total": row["loss/total"] + 1e-12})
    (b / "metrics.jsonl").write_text("".join(line + "\n" for line in lines[:3]))
    found = soak_resume.differences(a, b)
    assert found[0] == "metrics.jsonl: 4 and 3 rows"
    assert found[1].startswith("step 2: loss/total ")
    assert found[2] == "rollouts/step_000001.jsonl: other records, tokens or rewards"
    assert len(found) == 3

    c = tmp_path / "c"
    go(c, 4, data=Shifted())
    found = soak_resume.checkpoint_differences(a, c)
    assert any("params" in line and "kernel" in line for line in found)
    assert soak_resume.checkpoint_differences(a, tmp_path / "none") == [
        "last checkpoints: steps 4 and None"
    ]


class Shifted:
    """1, 2, 3, … in place of 0, 1, 2."""

    def __init__(self):
        from tests.training.test_loop import Numbers

        self.numbers = Numbers()
        next(self.numbers)

    def __next__(self):
        return next(self.numbers)

    def get_state(self):
        return self.numbers.get_state()

    def set_state(self, state):
        self.numbers.set_state(state)
