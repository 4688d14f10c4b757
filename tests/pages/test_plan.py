"""Resize plan, pixel budgets and processor settings (cases B01, B02, B04, B05, B06)."""

import json

import numpy as np
import pytest

from evisrag_jax.pages.decode import PageError
from evisrag_jax.pages.plan import (
    BUDGETS,
    PixelBudget,
    ResizePlan,
    VisionLayout,
    plan_resize,
    processor_settings,
    resolve_budget,
)

LAYOUT = VisionLayout()
DEFAULT, GRPO = BUDGETS["default"], BUDGETS["grpo"]

# preprocessor_config.json of the published Qwen2.5-VL checkpoints: limits at the top level.
PUBLISHED = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}


def sizes(count, seed, longest=6000):
    """Random (height, width), log-uniform, of accepted aspect ratio."""
    rng = np.random.default_rng(seed)
    found = []
    while len(found) < count:
        height, width = (int(x) for x in np.exp(rng.uniform(0, np.log(longest), 2)))
        if max(height, width) <= 200 * min(height, width):
            found.append((height, width))
    return found


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((27, 332), (28, 336, 12)),
        ((26, 28), (56, 84, 6)),
        ((1, 1), (56, 56, 4)),
        ((28, 28), (56, 56, 4)),
        ((14, 400), (28, 308, 11)),
    ],
)
def test_b01_sides_below_28_default(size, expected):
    plan = plan_resize(*size, DEFAULT, LAYOUT)
    assert (plan.height, plan.width, plan.tokens) == expected
    assert (plan.rows, plan.cols) == (plan.height // 14, plan.width // 14)


@pytest.mark.parametrize(
    ("size", "expected"), [((1, 1), (532, 532, 361)), ((27, 332), (168, 1820, 390))]
)
def test_b01_sides_below_28_grpo(size, expected):
    plan = plan_resize(*size, GRPO, LAYOUT)
    assert (plan.height, plan.width, plan.tokens) == expected


def test_b02_aspect_ratio():
    plan = plan_resize(10, 2000, DEFAULT, LAYOUT)
    assert (plan.height, plan.width, plan.tokens) == (28, 812, 29)
    for size in ((10, 2001), (2001, 10)):
        with pytest.raises(PageError, match=r"^scan 7\.png: .*aspect ratio 200\.1") as caught:
            plan_resize(*size, DEFAULT, LAYOUT, name="scan 7.png")
        assert (caught.value.path, caught.value.kind) == ("scan 7.png", "aspect")
        assert f"{size[1]} wide x {size[0]} high" in caught.value.reason
    with pytest.raises(PageError, match="no pixels"):
        plan_resize(0, 5, DEFAULT, LAYOUT)


@pytest.mark.parametrize(
    ("size", "limits", "expected"),
    [
        ((1000, 1000), {"min_pixels": 3136}, (1008, 1008, 1296)),
        ((1000, 1000), {"max_pixels": 1003520}, (980, 980, 1225)),
        ((2339, 1654), {"max_pixels": 1003520}, (1176, 840, 1260)),
        ((2339, 1654), {"min_pixels": 262144, "max_pixels": 1568000}, (1484, 1036, 1961)),
    ],
)
def test_b04_limits_are_obeyed_through_every_entry(tmp_path, size, limits, expected):
    edges = {
        {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}[key]: value
        for key, value in limits.items()
    }
    whole = {"min_pixels": 3136, "max_pixels": 12845056, **limits}
    bare = {k: v for k, v in PUBLISHED.items() if not k.endswith("_pixels")}
    top = tmp_path / "top"
    nested = tmp_path / "nested"
    for folder in (top, nested):
        folder.mkdir()
    (top / "preprocessor_config.json").write_text(json.dumps({**PUBLISHED, **limits}))
    size_only = {
        **bare,
        "size": {"shortest_edge": whole["min_pixels"], "longest_edge": whole["max_pixels"]},
    }
    (nested / "processor_config.json").write_text(json.dumps({"image_processor": size_only}))
    budgets = [
        resolve_budget(limits),
        resolve_budget({"name": "mine", **limits}),
        processor_settings(limits)[0],
        processor_settings({"size": edges})[0],
        processor_settings({"size": limits})[0],
        processor_settings({"size": edges, **limits})[0],
        processor_settings(top)[0],
        processor_settings(nested)[0],
        processor_settings(str(top))[0],
    ]
    for budget in budgets:
        plan = plan_resize(*size, budget, LAYOUT)
        assert (plan.height, plan.width, plan.tokens) == expected


def test_b04_no_limits_means_the_default_and_names_resolve():
    assert resolve_budget("grpo") == PixelBudget("grpo", 262144, 1568000)
    assert resolve_budget(GRPO) is GRPO
    assert processor_settings({})[0] == DEFAULT
    assert processor_settings({"budget": "sft"})[0] == BUDGETS["sft"]
    assert processor_settings({"min_pixels": 262144, "max_pixels": 1568000})[0].name == "grpo"
    assert resolve_budget({"max_pixels": 5000}).name == "3136-5000"
    assert plan_resize(2339, 1654, DEFAULT, LAYOUT).tokens == 4956


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_pixel": 5000}, r"unknown keys \['max_pixel'\]"),
        ({"budget": "huge"}, "unknown pixel budget 'huge'.*grpo"),
        (
            {"max_pixels": 5000, "size": {"longest_edge": 6000}},
            "max_pixels is given twice and disagrees: max_pixels=5000, size.longest_edge=6000",
        ),
        ({"min_pixels": 5000, "size": {"shortest_edge": 6000}}, "min_pixels is given twice"),
        ({"budget": "grpo", "max_pixels": 5000}, "budget=1568000, max_pixels=5000"),
        ({"size": {"height": 448, "width": 448}}, "size="),
        ({"min_pixels": 9000, "max_pixels": 5000}, "min_pixels=9000 is above max_pixels=5000"),
        ({"max_pixels": "5000"}, "'5000' is not a positive int"),
        ({"max_pixels": True}, "not a positive int"),
        ({"size": {"longest_edge": [1]}}, "size.longest_edge=.* is not a positive int"),
        ({"patch_size": "14"}, "processor settings: patch_size='14'"),
        ({"image_mean": [0.5, 0.5]}, r"image_mean=\[0.5, 0.5\] is not three numbers"),
        ({"image_mean": 0.5}, "image_mean=0.5 is not three numbers"),
        ({"do_resize": False}, "do_resize=False"),
        ({"resample": 2}, "resample=2"),
        ({"rescale_factor": 1.0}, "rescale_factor"),
        ({"temporal_patch_size": 1}, "temporal_patch_size=1"),
        ({"window_size": 100}, "window=100 is not a multiple"),
        ({"image_std": [0.0, 1.0, 1.0]}, "std above 0"),
    ],
)
def test_b04_what_would_be_ignored_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        processor_settings(settings)


@pytest.mark.parametrize(
    ("limits", "message"),
    [({}, "neither"), ({"max_pixel": 9}, "unknown keys"), ("enormous", "unknown pixel budget")],
)
def test_b04_resolve_budget_refuses(limits, message):
    with pytest.raises(ValueError, match=message):
        resolve_budget(limits)


def test_b04_folder_files_are_checked_against_each_other(tmp_path):
    plain = tmp_path / "preprocessor_config.json"
    with pytest.raises(FileNotFoundError, match=r"preprocessor_config\.json"):
        processor_settings(tmp_path)

    plain.write_text(json.dumps(PUBLISHED))
    assert processor_settings(tmp_path) == (DEFAULT, VisionLayout())
    # What newer exports add: null keys of a base class.
    plain.write_text(json.dumps({**PUBLISHED, "crop_size": None, "some_new_key": None}))
    assert processor_settings(tmp_path) == (DEFAULT, VisionLayout())

    model = tmp_path / "config.json"
    model.write_text(json.dumps({"vision_config": {"window_size": 56, "patch_size": 14}}))
    assert processor_settings(tmp_path) == (DEFAULT, VisionLayout(window=56))
    model.write_text(json.dumps({"vision_config": {"window_size": 112, "patch_size": 16}}))
    with pytest.raises(ValueError, match="patch_size is 14, but .* says 16"):
        processor_settings(tmp_path)
    model.unlink()

    nested = tmp_path / "processor_config.json"
    nested.write_text(json.dumps({"image_processor": {**PUBLISHED, "max_pixels": 5000}}))
    with pytest.raises(ValueError, match="disagree"):
        processor_settings(tmp_path)
    nested.unlink()

    for content, message in (
        ({**PUBLISHED, "max_pixel": 5000}, "unknown keys"),
        ({**PUBLISHED, "budget": "grpo"}, "no keys of a published"),
        ({**PUBLISHED, "max_pixels": None}, "gives no max_pixels"),
        ([], "expected a JSON object"),
    ):
        plain.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message) as caught:
            processor_settings(tmp_path)
        assert str(plain) in str(caught.value)
    plain.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        processor_settings(tmp_path)


def test_b04_processor_saved_by_transformers_loads(tmp_path):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    Qwen2VLImageProcessorPil(min_pixels=262144, max_pixels=1568000).save_pretrained(tmp_path)
    assert processor_settings(tmp_path) == (GRPO, VisionLayout())


@pytest.mark.parametrize("name", sorted(BUDGETS))
def test_b05_planning_a_planned_size_changes_nothing(name):
    """10,000 sizes a budget; the only exceptions are strips of one merged patch (28 px) whose
    planned ratio passes 200 or whose area stays above the budget, as ``plan_resize`` documents.
    Pages are planned once, so these strips are consistent too (test_patches)."""
    budget, exceptions = BUDGETS[name], []
    for size in sizes(10_000, seed=5):
        plan = plan_resize(*size, budget, LAYOUT)
        area = plan.height * plan.width
        thin = min(plan.height, plan.width) == 28
        assert plan.height % 28 == plan.width % 28 == 0
        assert area >= budget.min_pixels
        assert area <= budget.max_pixels or thin
        assert plan.tokens * 4 == plan.rows * plan.cols
        try:
            again = plan_resize(plan.height, plan.width, budget, LAYOUT)
        except PageError:
            again = None
        if again != plan:
            exceptions.append(size)
            ratio = max(plan.height, plan.width) / 28
            assert thin and (ratio > 200 or area > budget.max_pixels), (size, plan)
    if name == "grpo":
        assert not exceptions


def test_b05_known_exceptions():
    """Named examples of the two kinds: a planned ratio above 200, and an area above the budget."""
    plan = plan_resize(5820, 39, DEFAULT, LAYOUT)
    assert (plan.height, plan.width) == (5824, 28)
    with pytest.raises(PageError, match="aspect"):
        plan_resize(5824, 28, DEFAULT, LAYOUT)
    plan = plan_resize(2971, 17, BUDGETS["mini"], LAYOUT)
    assert (plan.height, plan.width) == (2940, 28)
    assert plan_resize(2940, 28, BUDGETS["mini"], LAYOUT).height == 2268


@pytest.mark.parametrize("name", sorted(BUDGETS))
def test_plan_equals_the_published_rule(name):
    """Independent: transformers' own smart_resize, exact, on 2,000 sizes a budget."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    budget = BUDGETS[name]
    for size in sizes(2000, seed=11):
        plan = plan_resize(*size, budget, LAYOUT)
        expected = smart_resize(*size, 28, budget.min_pixels, budget.max_pixels)
        assert (plan.height, plan.width) == expected


def test_ties_round_to_even():
    assert plan_resize(14 + 28 * 4, 280, DEFAULT, LAYOUT).height == 28 * 4
    assert plan_resize(14 + 28 * 5, 280, DEFAULT, LAYOUT).height == 28 * 6


def test_b06_one_page_at_three_budgets():
    """A 2339 x 1654 page, five copies: what each stage's budget costs in tokens."""
    tokens = {name: plan_resize(2339, 1654, BUDGETS[name], LAYOUT).tokens for name in BUDGETS}
    assert tokens["sft"] == tokens["default"] == 4956
    assert 5 * tokens["sft"] == 24_780
    assert tokens["grpo"] == 1961
    assert 5 * tokens["grpo"] == 9_805
    assert (BUDGETS["sft"].min_pixels, BUDGETS["sft"].max_pixels) == (3136, 3_920_000)


def test_other_layouts():
    small = VisionLayout(patch=7, merge=2, window=28)
    assert (small.factor, small.window_units, small.slots, small.channels) == (14, 2, 16, 147)
    budget = PixelBudget("tiny", 196, 10_000)
    assert plan_resize(20, 30, budget, small) == ResizePlan(14, 28, 2, 4, 2)
    with pytest.raises(ValueError, match="not a positive int"):
        VisionLayout(patch=0)
