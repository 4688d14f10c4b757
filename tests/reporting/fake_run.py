"""A run folder as a training run leaves it behind, made of drawn pages and plausible numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CHANNELS = ("accuracy", "evidence", "format", "overlong", "isObserve", "isThink")
TAGS = ("observe", "evidence", "think", "answer")
CITIES = ("Orvane", "Tilmouth", "Kessra", "Dunholm", "Avelay", "Brisk Bay", "Norhaven", "Pellworth")


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def draw_page(path: Path, city: str, passengers: int, size: tuple[int, int] = (300, 390)) -> None:
    """A page with a heading, a small table and grey lines of text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    width, height = size
    draw.text((20, 18), f"Harbour report: {city}", fill="#123")
    draw.line((20, 36, width - 20, 36), fill="#357", width=2)
    for i, (name, value) in enumerate(
        [("Passengers", passengers), ("Ships", passengers // 90), ("Crew", passengers // 30)]
    ):
        y = 52 + 22 * i
        draw.rectangle(
            (20, y, width - 20, y + 20), outline="#aab", fill="#eef3f8" if i % 2 else None
        )
        draw.text((26, y + 5), name, fill="#222")
        draw.text((width - 90, y + 5), str(value), fill="#222")
    for y in range(140, height - 20, 12):
        draw.line((20, y, width - 20 - (y * 7) % 60, y), fill="#ccc", width=3)
    image.save(path)


def tagged(observe: str, evidence: list[str | None], think: str, answer: str) -> str:
    lines = "\n".join(
        f"[{i + 1}]: {e or 'no relevant information'}" for i, e in enumerate(evidence)
    )
    return (
        f"<observe>\n{observe}\n</observe>\n<evidence>\n{lines}\n</evidence>\n"
        f"<think>\n{think}\n</think>\n<answer>{answer}</answer>"
    )


def make_rollout(rng: np.random.Generator, run: Path, step: int, q: int, skill: float) -> dict:
    city = CITIES[q % len(CITIES)]
    passengers = 1200 + 137 * q
    evidence = [None, f"Passengers in {city}: {passengers}", None]
    images = [f"pages/{CITIES[(q + d) % len(CITIES)]}.png" for d in (1, 0, 2)]
    samples, rewards = [], []
    for index in range(8):
        right, seen, formed = rng.random(3) < (skill, skill + 0.1, skill + 0.3)
        answer = str(passengers) if right else str(passengers + 10 * int(rng.integers(1, 9)))
        said = evidence if seen else [f"Ships: {passengers // 90}", None, None]
        text = tagged(
            f"The question asks for passengers. Page 2 is headed {city}; the others are other harbours.",
            said,
            f"The table of {city} gives the number of passengers, so it is {answer}.",
            answer,
        )
        if not formed:
            text = text.replace("</think>\n", "") + "\nI hope this helps."
        rewards.append(
            [3.0 * right, 3.0 * seen, float(formed), -float(rng.random() < 0.1), 0.0, 0.0]
        )
        sections = (
            {}
            if not formed
            else {tag: text.split(f"<{tag}>")[1].split(f"</{tag}>")[0] for tag in TAGS}
        )
        samples.append(
            {
                "index": index,
                "text": text,
                "length": int(rng.integers(90, 240)),
                "finish": "stop" if formed else "length",
                "sections": sections,
            }
        )
    table = np.array(rewards)
    advantages = (table - table.mean(0)) / (table.std(0, ddof=1) + 1e-6)
    for sample, reward, advantage in zip(samples, rewards, advantages, strict=True):
        sample["rewards"] = dict(zip(CHANNELS, map(float, reward), strict=True))
        sample["advantages"] = dict(zip(CHANNELS, map(float, advantage), strict=True))
    return {
        "step": step,
        "id": f"harbour-{q:04d}",
        "question": f"How many passengers did {city} count in 2019?",
        "images": [str(run / i) for i in images],
        "answers": [str(passengers), f"{passengers:,}"],
        "is_sufficient": True,
        "evidence": evidence,
        "samples": samples,
    }


def make_metrics(rng: np.random.Generator, steps: int) -> list[dict]:
    rows = []
    for step in range(1, steps + 1):
        t = step / steps
        rise = 1 / (1 + math.exp(-8 * (t - 0.4)))
        noise = lambda scale: float(scale * rng.standard_normal())  # noqa: E731
        row = {"step": step, "time": 6.1 * step + 40, "lr": 1e-6 * min(1.0, 5 * t)}
        row |= {
            "reward/accuracy": 0.5 + 1.9 * rise + noise(0.12),
            "reward/evidence": 0.8 + 1.8 * rise + noise(0.1),
            "reward/format": 0.55 + 0.42 * rise + noise(0.03),
            "reward/overlong": -0.2 * (1 - rise) + noise(0.01),
            "reward/isObserve": -0.05 * (1 - rise) + noise(0.005),
            "reward/isThink": -0.02 + noise(0.004),
        }
        row["reward/overall"] = sum(v for k, v in row.items() if k.startswith("reward/"))
        row |= {
            "loss/total": 0.02 + noise(0.004),
            "loss/kl": 0.0007 * step + abs(noise(0.001)),
            "loss/entropy": 1.1 - 0.6 * rise + noise(0.02),
            "loss/grad_norm": abs(0.5 + noise(0.1)) + (60 if step == 17 else 0),
            "rollout/length_mean": 210 - 60 * rise + noise(6),
            "rollout/clipped_ratio": max(0.0, 0.12 * (1 - rise) + noise(0.01)),
            "rollout/logp_gap": abs(2e-3 + noise(6e-4)),
            "compile/count": 11,
            "time/decode": 3.4 + noise(0.2),
            "time/update": 2.0 + noise(0.1),
        }
        row |= {f"scope/found_{tag}": min(1.0, 0.6 + 0.4 * rise + noise(0.015)) for tag in TAGS}
        if step == 9:
            row["loss/total"] = math.nan
        if step % 20 == 0 or step == 1:
            row |= {
                "eval/accuracy": 0.25 + 0.55 * rise,
                "eval/f1": 0.3 + 0.5 * rise,
                "eval/evidence": 0.4 + 0.4 * rise,
                "eval/format": 0.6 + 0.38 * rise,
            }
        rows.append(row)
    return rows


def make_timeline(rng: np.random.Generator, steps: int) -> list[dict]:
    rows, now = [], 0.0
    for step in range(1, steps + 1):
        slow = 9.0 if step == 1 else 1.0
        for name, seconds in (("prefill", 0.5), ("decode", 3.2), ("reward", 0.15), ("update", 2.0)):
            took = seconds * slow * float(rng.uniform(0.85, 1.2))
            rows.append({"step": step, "name": name, "start": now, "seconds": took})
            now += took + (0.2 if name == "reward" else 0.0)
    return rows


def make_predictions(rng: np.random.Generator, count: int) -> list[dict]:
    rows = []
    for i in range(count):
        city, passengers = CITIES[i % len(CITIES)], 1200 + 137 * i
        sufficient = i % 5 != 4
        right = rng.random() < 0.75
        answer = str(passengers) if right == sufficient else "insufficient to answer"
        if sufficient and not right and i % 2:
            answer = str(passengers + 7)
        rows.append(
            {
                "id": f"test-{i:04d}",
                "prediction": tagged(
                    "Looked at both pages.", [f"{city}: {passengers}", None], "Read it off.", answer
                ),
                "answer": answer,
                "finish": "stop",
                "length": 140 + i,
                "method": "evidence_cot",
                "images": [f"pages/{city}.png", f"pages/{CITIES[(i + 3) % len(CITIES)]}.png"],
                "question": f"How many passengers did {city} count?",
                "answers": [str(passengers)],
                "is_sufficient": sufficient,
                "degenerate": i == 7,
            }
        )
    return rows


SUMMARY = {
    "name": "rs-grpo mini, seed 0",
    "command": "evisrag rl --config=rs_grpo.py:mini --config.steps=60 --out runs/rs-grpo-mini",
    "date": "2026-11-30 20:14 UTC",
    "steps": 60,
    "compiles": 11,
    "duration": 407.3,
    "eval_before": {
        "accuracy": 0.287,
        "em": 0.241,
        "f1": 0.33,
        "evidence": 0.412,
        "format": 0.634,
        "n": 600,
        "hallucination": 0.31,
        "ci": {"accuracy": [0.252, 0.324], "evidence": [0.379, 0.446], "format": [0.596, 0.671]},
    },
    "eval_after": {
        "accuracy": 0.731,
        "em": 0.702,
        "f1": 0.755,
        "evidence": 0.803,
        "format": 0.981,
        "n": 600,
        "hallucination": 0.09,
        "ci": {"accuracy": [0.695, 0.766], "evidence": [0.776, 0.829], "format": [0.968, 0.991]},
    },
}
VERSIONS = {
    "evisrag_jax": "0.1.0",
    "git": "3f2a91c",
    "python": "3.11.9",
    "packages": {"jax": "0.10.2", "flax": "0.12.8"},
    "device": "cpu × 1",
}
CONFIG = {
    "model": {"path": "mini", "dtype": "float32"},
    "rl": {"steps": 60, "group": 8, "lr": 1e-6, "mode": "code"},
    "seed": 0,
}


def make_run(
    run: Path, *, steps: int = 60, predictions: int = 90, page_size: tuple[int, int] = (300, 390)
) -> Path:
    """A complete reinforcement-learning run folder."""
    rng = np.random.default_rng(7)
    for i, city in enumerate(CITIES):
        draw_page(run / "pages" / f"{city}.png", city, 1200 + 137 * i, page_size)
    write_json(run / "summary.json", SUMMARY)
    write_json(run / "versions.json", VERSIONS)
    write_json(run / "config.json", CONFIG)
    write_jsonl(run / "metrics.jsonl", make_metrics(rng, steps))
    write_jsonl(run / "timeline.jsonl", make_timeline(rng, steps))
    write_jsonl(run / "predictions.jsonl", make_predictions(rng, predictions))
    write_jsonl(
        run / "rejected.jsonl",
        [{"id": "harbour-0311", "path": "pages/x.png", "reason": "image file is truncated"}],
    )
    for step in range(10, steps + 1, 10):
        rows = [
            make_rollout(rng, run, step, step // 10 + q, 0.25 + 0.6 * step / steps)
            for q in range(5)
        ]
        write_jsonl(run / "rollouts" / f"step_{step:06d}.jsonl", rows)
    return run
