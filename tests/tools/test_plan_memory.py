"""The memory planner: within 15 % of the compiler, its arithmetic by hand, the official job, refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from plan.check import LIMIT, compare, small
from plan.devices import DEVICES, available
from plan.job import Job
from plan.parts import Sizes, plan
from plan.report import largest, official, table

from evisrag_jax.models.qwen25vl.sizes import published

ROOT = Path(__file__).parents[2]
GIB = 2**30


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "rl, long responses",
        "sft, everything kept",
        "rl, 8 devices, fsdp",
        "rl, slices of one prompt",
    ],
)
def test_the_plan_is_within_15_percent_of_the_compiler(name):
    """Argument + output - alias + temporary bytes of the real compiled update, one device and eight."""
    one = compare(name)
    assert abs(one.error) <= LIMIT, one


def test_state_by_hand():
    """7B over eight devices: 7,615,616,512 decoder parameters of 4 + 8 bytes and a tower of 676,550,144 of 4
    bytes, but for what does not divide (norms)."""
    found = plan(official("7b", fsdp=8))
    decoder, tower = 7_615_616_512, 676_550_144
    assert found.resident["Adam moments"] == pytest.approx(8 * decoder / 8, rel=1e-3)
    assert found.resident["parameters"] == pytest.approx(4 * (decoder + tower) / 8, rel=1e-2)
    assert found.rollout["sampling copy"] == 2 * (decoder + tower)
    kv = 2 * 4 * 128 * 28 * 2  # bytes a token: keys and values of four heads, bfloat16
    assert found.rollout["responses' keys and values"] == 32 * 1536 * kv
    assert found.rollout["prompts' keys and values"] == 4 * 15_000 * kv


def test_the_official_job_fits_eight_a100():
    """32 prompts x 8 of 15,000 + 1,536 tokens, 7B, float32 masters; 32B does not, and says what would."""
    room = available(DEVICES["a100-80"])
    job = official("7b", fsdp=8)
    assert plan(job).peak < 0.75 * room
    assert largest(job, room)[0] >= 1
    big = official("32b", fsdp=8)
    assert plan(big).peak > room
    assert plan(big.change(lora_rank=16, param="bfloat16", rollout_tensor=8)).peak < room


def test_knobs_move_the_parts_that_they_are_for():
    job = Job(small(), prompts=8, group=4, prompt=1024, response=512, micro=4)
    base = plan(job)
    assert plan(job.change(micro=1)).update_peak < base.update_peak
    assert plan(job.change(moments="bfloat16")).resident["Adam moments"] == (
        base.resident["Adam moments"] / 2
    )
    fewer = plan(job.change(slots=8)).rollout
    for part in ("responses' keys and values", "prompts' keys and values"):
        assert fewer[part] < base.rollout[part]
    wide = plan(job.change(fsdp=2, tensor=2, rollout_tensor=4, micro=2))
    assert wide.rollout["sampling copy"] < base.rollout["sampling copy"]
    assert plan(job.change(remat="none")).update_peak > base.update_peak
    assert not plan(job.change(method="sft")).rollout


def test_heads_that_do_not_divide_stay_whole():
    """7B has four key-value heads and 28 query heads: over eight tensor devices both stay whole."""
    text = published("7b").text
    job = Job(published("7b"), tensor=8, fsdp=1, prompts=8)
    whole = text.width * (text.heads * 2 + 2 * text.kv_heads) * text.head_dim  # q, o, k, v
    mlp = 3 * text.width * text.mlp // 8
    rest = 2 * text.width + (text.heads + 2 * text.kv_heads) * text.head_dim  # norms and biases
    assert Sizes(job).layer == whole + mlp + rest


def test_the_command_says_what_fits(tmp_path):
    command = [sys.executable, ROOT / "tools/plan_memory.py", "--model", "7b", "--prompt", "15000"]
    out = tmp_path / "plan.json"

    def run(*more):
        words = [str(word) for word in (*command, *more)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
        return done.returncode, done.stdout + done.stderr

    code, text = run("--json", out)
    facts = json.loads(out.read_text())
    assert code == 0 and "fits: 50." in text and facts["rollout_peak"] < facts["available"]
    code, text = run("--device", "a100-40", "--mesh", "fsdp=8")
    assert code == 1 and "DOES NOT FIT" in text and "largest that fits: micro=" in text
    assert (
        run("--mesh", "fsdp=7")[1].strip() == "plan_memory: 32 prompts do not divide over 7 devices"
    )
    assert "sizes of data, fsdp and tensor" in run("--mesh", "pipe=2")[1]


def test_the_committed_table_is_what_the_command_prints():
    """docs/memory.md holds the table of `--table`, row by row."""
    assert table() in (ROOT / "docs/memory.md").read_text()
