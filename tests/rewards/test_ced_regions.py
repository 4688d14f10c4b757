"""CED's controls and neutralisers: equal sizes, shared by a group, and means by hand (CED spec 1.3)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.pages.patches import make_patches, reading_order_patches, stack_pages
from evisrag_jax.pages.plan import PixelBudget, VisionLayout
from evisrag_jax.pages.regions import token_iou
from evisrag_jax.rewards.ced.config import RegionConfig
from evisrag_jax.rewards.ced.controls import INK_BAND, draw_controls
from evisrag_jax.rewards.ced.neutralise import Region, hide_pixels, make_regions, neutralise
from tests.models.tiny import noise_picture

CONFIG = RegionConfig()


def block(shape, *box):
    """Tokens of rows top..bottom and columns left..right, ends excluded."""
    out = np.zeros(shape, bool)
    if box:
        top, bottom, left, right = box
        out[top:bottom, left:right] = True
    return out


def test_controls_match_and_belong_to_the_sample():
    """Equal counts a page, IoU at most 0.05, the same at every call, others for another sample."""
    rng = np.random.default_rng(0)
    seen = set()
    for i in range(50):
        shape = tuple(rng.integers(6, 14, 2))
        height, width = rng.integers(1, 4, 2)
        top, left = rng.integers(shape[0] - height + 1), rng.integers(shape[1] - width + 1)
        evidence = (block(shape, top, top + height, left, left + width), block((4, 5)))
        drawn = draw_controls(evidence, f"q{i}", CONFIG)
        again = draw_controls(evidence, f"q{i}", CONFIG)
        assert len(drawn.regions) == 3 and not drawn.degenerate
        for one, two in zip(drawn.regions, again.regions, strict=True):
            assert (one[0] == two[0]).all() and not one[1].any()
            assert one[0].sum() == evidence[0].sum()
            assert token_iou(one[0], evidence[0]) <= 0.05
        other = draw_controls(evidence, f"r{i}", CONFIG)
        seen.add(
            any((a[0] != b[0]).any() for a, b in zip(drawn.regions, other.regions, strict=True))
        )
    assert True in seen


def test_a_control_keeps_the_shape_where_it_fits():
    evidence = (block((9, 9), 2, 4, 3, 6),)
    drawn = draw_controls(evidence, "a", CONFIG)
    assert drawn.scattered == (False,) * 3
    for (one,) in drawn.regions:
        rows, cols = np.nonzero(one)
        assert (np.ptp(rows), np.ptp(cols)) == (1, 2) and one.sum() == 6
    assert len({one.tobytes() for (one,) in drawn.regions}) == 3


def test_where_no_place_is_left():
    """A band that fits nowhere else: random tokens beside it; over half of the page: flagged, smaller;
    the whole page: nothing to compare; nothing: no controls."""
    band = (block((4, 4), 1, 3, 0, 4),)
    drawn = draw_controls(band, "a", dataclasses.replace(CONFIG, max_iou=0.0))
    assert drawn.scattered == (True,) * 3 and not drawn.degenerate
    assert all(one.sum() == 8 and not (one & band[0]).any() for (one,) in drawn.regions)
    large = draw_controls((block((4, 4), 0, 3, 0, 4),), "a", CONFIG)
    assert large.degenerate and all(one.sum() == 4 for (one,) in large.regions)
    whole = draw_controls((np.ones((4, 4), bool),), "a", CONFIG)
    assert whole.degenerate and not any(one.any() for (one,) in whole.regions)
    assert draw_controls((block((4, 4)),), "a", CONFIG).regions == ()


def test_ink_and_other_pages():
    """On a page whose lower half is blank, controls stay in the dark half; the last one goes to the page
    without evidence."""
    ink = np.zeros((12, 6))
    ink[:6] = np.random.default_rng(1).uniform(0.27, 0.33, (6, 6))
    evidence = (block((12, 6), 0, 1, 0, 2), block((5, 5)))
    config = dataclasses.replace(CONFIG, match_ink=True, other_page=True)
    drawn = draw_controls(evidence, "a", config, ink=(ink, np.zeros((5, 5))))
    wanted = ink[evidence[0]].mean()
    for one, _ in drawn.regions[:2]:
        assert abs(ink[one].mean() - wanted) <= INK_BAND * wanted
    first, second = drawn.regions[2]
    assert not first.any() and second.sum() == 2
    with pytest.raises(ValueError, match="record a: match_ink needs the ink"):
        draw_controls(evidence, "a", config)


def by_hand(features, inside, source):
    out = features.copy()
    for n in range(len(features)):
        if inside[n].any():
            out[n, inside[n]] = features[n, source[n]].mean(0)
    return out


@pytest.fixture
def drawn():
    """Two images of 3 x 4 and 2 x 2 tokens, padded to 14: evidence on both, one control."""
    evidence = (block((3, 4), 0, 1, 0, 2), block((2, 2), 1, 2, 1, 2))
    control = (block((3, 4), 2, 3, 1, 3), block((2, 2), 0, 1, 0, 1))
    features = np.random.default_rng(2).normal(size=(2, 14, 6)).astype(np.float32)
    return evidence, control, features


def run(features, regions, r, neutraliser, salt=3):
    inside, source, near = (jnp.asarray(a[0, r]) for a in regions)
    return np.asarray(
        neutralise(jnp.asarray(features), inside, source, near, neutraliser, jnp.uint32(salt))
    )


def test_mean(drawn):
    evidence, control, features = drawn
    for excludes in (True, False):
        config = dataclasses.replace(CONFIG, ring=1)
        spared = evidence if excludes else None
        regions = make_regions([[Region(evidence), Region(control, spared)]], 2, 14, config)
        for r, region in enumerate((evidence, control)):
            got = run(features, regions, r, "mean")
            wanted = by_hand(features, regions.inside[0, r], regions.source[0, r])
            assert np.abs(got - wanted).max() <= 1e-6
            untouched = ~regions.inside[0, r]
            assert (got[untouched] == features[untouched]).all()
            assert regions.inside[0, r].sum() == sum(one.sum() for one in region)
        # the control's ring on image 1 holds the evidence's token 3 only where it may
        assert regions.source[0, 1, 1, 3] == (not excludes)
    # rings never cross images: tokens of the first stand at rows 0..11, of the second at 0..3
    assert not regions.source[0, 0, 1, 4:].any()


def test_mean_local(drawn):
    evidence, control, features = drawn
    config = dataclasses.replace(CONFIG, ring=1, neutraliser="mean_local")
    own = [Region(evidence), Region(control, evidence)]
    regions = make_regions([own], 2, 14, config)
    got = run(features, regions, 0, "mean_local")
    # token (0, 0) of image 0: neighbours (1, 0), (1, 1); (0, 1): (0, 2), (1, 0), (1, 1), (1, 2)
    assert np.abs(got[0, 0] - features[0, [4, 5]].mean(0)).max() <= 1e-6
    assert np.abs(got[0, 1] - features[0, [2, 4, 5, 6]].mean(0)).max() <= 1e-6
    assert np.abs(got[1, 3] - features[1, [0, 1, 2]].mean(0)).max() <= 1e-6


def test_zero_and_noise(drawn):
    evidence, _, features = drawn
    regions = make_regions([[Region(evidence)]], 2, 14, CONFIG)
    zero = run(features, regions, 0, "zero")
    inside = regions.inside[0, 0]
    assert (zero[inside] == 0).all() and (zero[~inside] == features[~inside]).all()
    wide = np.random.default_rng(5).normal(3.0, 2.0, (2, 14, 4096)).astype(np.float32)
    noise = run(wide, regions, 0, "noise")
    spread = wide[0, inside[0]].std()
    assert noise[0, inside[0]].std() == pytest.approx(spread, rel=0.05)
    assert abs(noise[0, inside[0]].mean()) < 0.1
    assert (run(wide, regions, 0, "noise") == noise).all()
    assert (run(wide, regions, 0, "noise", salt=4) != noise).any()


def test_fewer_regions_change_nothing(drawn):
    """A prompt with fewer regions than another, or with none at all."""
    evidence, control, features = drawn
    regions = make_regions([[Region(evidence), Region(control)], []], 2, 14, CONFIG)
    assert not regions.inside[1].any()
    inside, source, near = (jnp.asarray(a[1, 0]) for a in regions)
    for kind in ("mean", "zero", "noise", "mean_local"):
        same = neutralise(jnp.asarray(features), inside, source, near, kind, jnp.uint32(1))
        assert (np.asarray(same) == features).all(), kind


def test_pixels():
    """All pixels of the region in the mean colour of its ring's pixels, the others as they were."""
    layout = VisionLayout()
    page = make_patches(noise_picture(4, 84, 140), layout, PixelBudget("test", 784, 10**6))
    pages = stack_pages([(page,)], images=2, windows=4, tokens=20, layout=layout)
    evidence = (block((3, 5), 0, 2, 1, 3),)
    regions = make_regions(
        [[Region(evidence)]], 2, 20, dataclasses.replace(CONFIG, neutraliser="pixel")
    )
    hidden = jax.jit(hide_pixels)(pages, regions.inside[:, 0], regions.source[:, 0])
    before = reading_order_patches(page).reshape(15, 4, 3, 196)
    seen = dataclasses.replace(page, patches=np.asarray(hidden.patches)[0, 0, : len(page.patches)])
    after = reading_order_patches(seen).reshape(15, 4, 3, 196)
    inside, source = regions.inside[0, 0, 0, :15], regions.source[0, 0, 0, :15]
    colour = before[source].mean((0, 1, 3))
    assert np.abs(after[inside] - colour[None, None, :, None]).max() <= 1e-5
    assert (after[~inside] == before[~inside]).all()
    assert (np.asarray(hidden.patches)[0, 1] == pages.patches[0, 1]).all()
