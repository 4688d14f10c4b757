"""The three attention functions against their definition in float64, by every implementation.

Tolerances: 1e-5 (relative and absolute) for outputs and for gradients' relative norm in float32;
bfloat16 keeps 8 bits, 2 % of the norm.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from evisrag_jax.models import attention, blocked_attention
from evisrag_jax.runtime.mesh import make_mesh
from tests.models.tiny import relative

TOLERANCE = 1e-5
PLAIN_AND_FAST = pytest.mark.parametrize("implementation", ["xla", "blocked"])


@pytest.fixture
def blocks(monkeypatch):
    """Blocks and stages that nothing divides by; the real ones exceed most shapes here."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 5)
    monkeypatch.setattr(blocked_attention, "BLOCK", 5)
    monkeypatch.setattr(blocked_attention, "LONE_BLOCK", 5)
    monkeypatch.setattr(blocked_attention, "STAGES", 3)


def draw(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def softmax_rows(q, k, v, seen):
    """[T, H] × [M, H] → [T, H] in float64; rows that see nothing are zero here."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    out = np.zeros_like(q)
    for t in np.flatnonzero(seen.any(1)):
        scores = k[seen[t]] @ q[t] / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        out[t] = weights @ v[seen[t]] / weights.sum()
    return out


def causal_reference(q, k, v, lengths):
    """Each head of each prompt by itself; padding rows see the real keys."""
    P, L, N, _ = q.shape
    out = np.zeros(q.shape, np.float64)
    for p, n in itertools.product(range(P), range(N)):
        head = n // (N // k.shape[2])
        seen = np.tril(np.ones((L, L), bool)) & (np.arange(L) < lengths[p])
        out[p, :, n] = softmax_rows(q[p, :, n], k[p, :, head], v[p, :, head], seen)
    return out


def group_reference(q, prefix_k, prefix_v, lengths, own_k, own_v):
    """The repeated path: each response behind its own copy of the prompt's real keys."""
    P, G, T, N, _ = q.shape
    out = np.zeros(q.shape, np.float64)
    for p, g, n in itertools.product(range(P), range(G), range(N)):
        head, size = n // (N // own_k.shape[3]), lengths[p]
        keys = np.concatenate([prefix_k[p, :size, head], own_k[p, g, :, head]])
        values = np.concatenate([prefix_v[p, :size, head], own_v[p, g, :, head]])
        seen = np.concatenate([np.ones((T, size), bool), np.tril(np.ones((T, T), bool))], 1)
        out[p, g, :, n] = softmax_rows(q[p, g, :, n], keys, values, seen)
    return out


def masked_reference(q, k, v, mask):
    B, S, N, _ = q.shape
    out = np.zeros(q.shape, np.float64)
    for b, n in itertools.product(range(B), range(N)):
        seen = np.broadcast_to(mask[b], (S, S))
        out[b, :, n] = softmax_rows(q[b, :, n], k[b, :, n], v[b, :, n], seen)
    return out


def causal_case(P, L, N, K, H, lengths):
    arrays = (draw(0, P, L, N, H), draw(1, P, L, K, H), draw(2, P, L, K, H))
    lengths = np.array(lengths, np.int32)
    rows = np.broadcast_to((lengths > 0)[:, None, None, None], arrays[0].shape)
    return attention.causal_attention, causal_reference, (*arrays, lengths), (0, 1, 2), rows


def group_case(P, G, T, L, N, K, H, lengths):
    arrays = [draw(0, P, G, T, N, H), draw(1, P, L, K, H), draw(2, P, L, K, H)]
    arrays += [np.array(lengths, np.int32), draw(3, P, G, T, K, H), draw(4, P, G, T, K, H)]
    rows = np.ones(arrays[0].shape, bool)
    return attention.group_attention, group_reference, tuple(arrays), (0, 1, 2, 4, 5), rows


def masked_case(B, S, N, H, empty=False):
    arrays = tuple(draw(i, B, S, N, H) for i in range(3))
    mask = np.random.default_rng(5).random((B, S)) < 0.7
    if empty:
        mask[0] = False
    rows = np.broadcast_to(mask.any(1)[:, None, None, None], arrays[0].shape)
    return attention.masked_attention, masked_reference, (*arrays, mask), (0, 1, 2), rows


CASES = {
    "causal, ragged": causal_case(3, 13, 4, 2, 8, [13, 7, 0]),
    "causal, one token": causal_case(2, 1, 2, 1, 4, [1, 0]),
    "causal, a head each": causal_case(1, 17, 3, 3, 16, [17]),
    "group, ragged": group_case(2, 3, 7, 11, 4, 2, 8, [11, 4]),
    "group, one response of one token": group_case(1, 1, 1, 6, 2, 1, 4, [6]),
    "group, no prompt": group_case(2, 2, 6, 5, 2, 2, 4, [0, 5]),
    "masked": masked_case(2, 13, 2, 8),
    "masked, an empty image": masked_case(3, 11, 1, 4, empty=True),
}
LARGE = {
    "causal": causal_case(1, 300, 8, 2, 64, [290]),
    "group": group_case(1, 2, 150, 170, 8, 2, 64, [161]),
    "masked": masked_case(1, 600, 2, 64),
    "windows": masked_case(6, 64, 4, 64),
}


def value_and_grads(function, arrays, wanted, rows, weights=None):
    """Output, and the gradient of a (drawn) functional of the rows that count."""
    weights = (draw(99, *rows.shape) if weights is None else weights) * rows

    @jax.jit
    def run(*arrays):
        def loss(*floats):
            whole = list(arrays)
            for i, a in zip(wanted, floats, strict=True):
                whole[i] = a
            out = function(*whole)
            return jnp.sum(out.astype(jnp.float32) * weights), out

        floats = [arrays[i] for i in wanted]
        return jax.value_and_grad(loss, tuple(range(len(wanted))), has_aux=True)(*floats)

    (_, out), grads = run(*arrays)
    return np.asarray(out), [np.asarray(g) for g in grads]


def assert_near(ours, theirs, tolerance=TOLERANCE):
    """Relative norm of the difference; a gradient that is zero on both sides is equal."""
    for a, b in zip(ours, theirs, strict=True):
        assert np.linalg.norm(np.asarray(a, np.float64) - b) <= tolerance * np.linalg.norm(b) + 1e-7


@PLAIN_AND_FAST
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name, implementation, blocks):
    """Outputs against float64, and finite rows where there is nothing to see."""
    function, reference, arrays, _, rows = CASES[name]
    out = np.asarray(jax.jit(functools.partial(function, implementation=implementation))(*arrays))
    assert np.isfinite(out).all()
    expected = reference(*arrays)
    np.testing.assert_allclose(out[rows], expected[rows], rtol=TOLERANCE, atol=TOLERANCE)


@PLAIN_AND_FAST
@pytest.mark.parametrize("name", LARGE)
def test_equals_the_definition_at_several_blocks(name, implementation):
    function, reference, arrays, _, _ = LARGE[name]
    out = jax.jit(functools.partial(function, implementation=implementation))(*arrays)
    np.testing.assert_allclose(out, reference(*arrays), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("group")])
def test_group_mass_is_attention_over_indicators(name, dtype, blocks):
    """Values that are 1 on a set of the prompt's keys and 0 elsewhere make the output the set's mass; the
    mean over heads against the float64 definition, to 1e-5, of bfloat16 numbers too."""
    q, prefix_k, _, lengths, own_k, own_v = CASES[name][2]
    q, prefix_k, own_k = (jnp.asarray(a, dtype) for a in (q, prefix_k, own_k))
    P, L = prefix_k.shape[:2]
    sets = np.random.default_rng(6).random((P, 3, L)) < 0.4
    mass = jax.jit(attention.group_attention_mass)(q, prefix_k, lengths, own_k, sets)
    assert mass.dtype == jnp.float32
    values = np.zeros(prefix_k.shape)
    values[..., :3] = sets.transpose(0, 2, 1)[:, :, None]
    exact = [np.asarray(a, np.float32) for a in (q, prefix_k, own_k)]
    expected = group_reference(*exact[:2], values, lengths, exact[2], np.zeros_like(own_v))
    np.testing.assert_allclose(mass, expected.mean(3)[..., :3], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_the_batched_ones(name, blocks):
    function, _, arrays, wanted, rows = CASES[name]
    _, ours = value_and_grads(
        functools.partial(function, implementation="blocked"), arrays, wanted, rows
    )
    _, theirs = value_and_grads(
        functools.partial(function, implementation="xla"), arrays, wanted, rows
    )
    assert_near(ours, theirs)


@pytest.mark.parametrize("name", ["causal, ragged", "group, ragged", "masked"])
def test_gradients_equal_finite_differences(name, blocks):
    """Of the float64 definition along a drawn direction; central differences of step 1e-5 are good
    to about 1e-9."""
    function, reference, arrays, wanted, rows = CASES[name]
    _, grads = value_and_grads(
        functools.partial(function, implementation="blocked"), arrays, wanted, rows
    )
    weights = draw(99, *rows.shape).astype(np.float64) * rows
    for i, grad in zip(wanted, grads, strict=True):
        direction = draw(100 + i, *grad.shape).astype(np.float64)
        moved = [list(arrays), list(arrays)]
        for sign, side in zip((1, -1), moved, strict=True):
            side[i] = arrays[i] + sign * 1e-5 * direction
        up, down = (np.sum(reference(*side) * weights) for side in moved)
        along, scale = np.sum(grad * direction), np.linalg.norm(grad) * np.linalg.norm(direction)
        assert abs(along - (up - down) / 2e-5) <= TOLERANCE * scale


def test_a_row_that_sees_nothing_has_finite_gradients():
    """Cotangents on every row, padding included (B29)."""
    for name in ("causal, ragged", "masked, an empty image"):
        function, _, arrays, wanted, rows = CASES[name]
        fast = functools.partial(function, implementation="blocked")
        _, grads = value_and_grads(fast, arrays, wanted, np.ones_like(rows))
        assert all(np.isfinite(g).all() for g in grads)


@PLAIN_AND_FAST
@pytest.mark.parametrize("name", ["causal, ragged", "group, ragged", "masked"])
def test_bfloat16(name, implementation, blocks):
    """bfloat16 in and out, within 2 % of float32 on the same numbers, gradients too."""
    function, reference, arrays, wanted, rows = CASES[name]
    half = [jnp.asarray(a, jnp.bfloat16) if a.dtype == np.float32 else a for a in arrays]
    exact = [np.asarray(a, np.float32) if a.dtype == jnp.bfloat16 else a for a in half]
    fast = functools.partial(function, implementation=implementation)
    out, grads = value_and_grads(fast, half, wanted, rows)
    assert {a.dtype for a in (out, *grads)} == {jnp.dtype(jnp.bfloat16)}
    assert relative(np.where(rows, out, 0), np.where(rows, reference(*exact), 0)) <= 0.02
    _, expected = value_and_grads(fast, exact, wanted, rows)
    assert_near([g.astype(np.float32) for g in grads], expected, 0.02)


@pytest.mark.parametrize("name", ["causal, ragged", "group, ragged", "masked"])
def test_vmap(name, blocks):
    """Over an axis of cases, forward and backward, equal to one at a time."""
    function, _, arrays, wanted, rows = CASES[name]
    fast = functools.partial(function, implementation="blocked")
    twice = [np.stack([a, np.flip(a, 0)]) for a in arrays]
    out, grads = value_and_grads(jax.vmap(fast), twice, wanted, np.stack([rows, np.flip(rows, 0)]))
    weights = draw(99, 2, *rows.shape)
    for i, kept in enumerate((rows, np.flip(rows, 0))):
        alone, theirs = value_and_grads(fast, [a[i] for a in twice], wanted, kept, weights[i])
        np.testing.assert_allclose(out[i], alone, rtol=TOLERANCE, atol=TOLERANCE)
        assert_near([g[i] for g in grads], theirs)


def _filled(arrays, wanted, floats):
    for i, a in zip(wanted, floats, strict=True):
        arrays[i] = a
    return arrays


@pytest.mark.parametrize("told", [False, True], ids=["mesh unknown", "mesh known"])
@pytest.mark.parametrize("name", ["causal", "group", "masked"])
def test_inputs_split_over_devices(name, told, monkeypatch):
    """Prompts over four devices, heads over two: the same numbers. A mesh that is set is seen when
    the function is traced, and the batched products, which split without a gather, are taken."""
    case = {
        "causal": causal_case(4, 70, 4, 2, 8, [70, 33, 1, 50]),
        "group": group_case(4, 2, 35, 20, 4, 2, 8, [20, 3, 11, 20]),
        "masked": masked_case(4, 70, 2, 8),
    }[name]
    function, reference, arrays, wanted, rows = case
    taken = []
    for part in ("causal", "group", "masked"):
        original = getattr(blocked_attention, part)
        watching = functools.partial(_watched, taken, original)
        monkeypatch.setattr(blocked_attention, part, watching)
    mesh = make_mesh(data=4, fsdp=1, tensor=2)
    specs = [Spec("data", *[None] * (a.ndim - 3), "tensor") if a.ndim > 2 else Spec("data")
             for a in arrays]  # fmt: skip
    split = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
    with jax.set_mesh(mesh) if told else contextlib.nullcontext():
        out, grads = value_and_grads(function, split, wanted, rows)
    assert bool(taken) != told
    np.testing.assert_allclose(out, reference(*arrays), rtol=TOLERANCE, atol=TOLERANCE)
    plain = functools.partial(function, implementation="xla")
    assert_near(grads, value_and_grads(plain, arrays, wanted, rows)[1])


def _watched(taken, original, *args):
    taken.append(original)
    return original(*args)


@pytest.mark.parametrize("name", ["causal", "group", "masked"])
def test_memory_grows_with_the_keys_not_with_their_square(name, monkeypatch):
    """Temporaries of value and gradient through two layers that share their lengths, L against 2L. A
    score matrix, or a mask of that size made ahead of the loops, would take four times as much."""
    monkeypatch.setattr(blocked_attention, "BLOCK", 32)
    monkeypatch.setattr(blocked_attention, "LONE_BLOCK", 32)
    monkeypatch.setattr(blocked_attention, "STAGES", 2)

    def temporaries(L):
        function, _, arrays, wanted, rows = {
            "causal": lambda: causal_case(1, L, 2, 1, 16, [L]),
            "group": lambda: group_case(1, 2, L // 4, L, 2, 1, 16, [L]),
            "masked": lambda: masked_case(1, L, 2, 16),
        }[name]()

        def loss(*floats):
            whole = _filled([jnp.asarray(a) for a in arrays], wanted, floats)

            def layer(q, _):
                return function(q, *whole[1:], implementation="blocked"), None

            return jax.lax.scan(layer, whole[0], length=2)[0].sum()

        floats = [arrays[i] for i in wanted]
        step = jax.jit(jax.value_and_grad(loss, tuple(range(len(wanted)))))
        return step.lower(*floats).compile().memory_analysis().temp_size_in_bytes

    small, large = temporaries(1024), temporaries(2048)
    assert large <= 2.3 * small
    assert large <= 8 * 2**20


def test_code_size_is_bounded():
    """A causal layer of 4,096 tokens has as many products as one of 1,024."""

    def products(L):
        shape = jax.ShapeDtypeStruct((1, L, 2, 8), jnp.float32)
        lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
        traced = jax.make_jaxpr(
            jax.grad(lambda q, k, v, n: blocked_attention.causal(q, k, v, n).sum())
        )(shape, shape, shape, lengths)
        return str(traced).count("dot_general[")

    assert products(4096) == products(1024) <= 7 * blocked_attention.STAGES


# Which implementation is taken.


@pytest.fixture
def taken(monkeypatch):
    """Names of the implementations that were taken, on a backend of one's choice."""
    names = []

    def watch(module, name, label):
        original = getattr(module, name)

        def watching(*args, **settings):
            names.append(label)
            return original(*args, **settings)

        monkeypatch.setattr(module, name, watching)

    for part in ("causal", "group", "masked"):
        watch(blocked_attention, part, "blocked")
        watch(attention, f"_{part}", "xla")

    def fused(q, k, v, *, implementation, is_causal=False, key_value_seq_lengths=None):
        assert implementation == "cudnn"
        names.append("cudnn")
        return original_fused(
            q, k, v, is_causal=is_causal, key_value_seq_lengths=key_value_seq_lengths,
            implementation="xla",
        )  # fmt: skip

    original_fused = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", fused)
    return names


def traced(case, dtype=jnp.float32, **settings):
    function, _, arrays, _, _ = case
    arrays = [jnp.asarray(a, dtype) if a.dtype == np.float32 else a for a in arrays]
    return jax.eval_shape(functools.partial(function, **settings), *arrays)


LONG = {
    "causal": causal_case(1, 70, 2, 1, 8, [70]),
    "group": group_case(1, 2, 40, 9, 2, 1, 8, [9]),
    "masked": masked_case(1, 70, 1, 8),
}


@pytest.mark.parametrize(
    ("backend", "dtype", "names"),
    [
        ("cpu", jnp.float32, ["blocked", "blocked", "blocked"]),
        ("gpu", jnp.bfloat16, ["cudnn", "xla", "cudnn"]),
        ("gpu", jnp.float32, ["xla", "xla", "xla"]),
        ("tpu", jnp.bfloat16, ["xla", "xla", "xla"]),
    ],
)
def test_the_backend_decides(taken, monkeypatch, backend, dtype, names):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    for case in LONG.values():
        traced(case, dtype)
    assert taken == names


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_vision_windows_stay_batched(taken, monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    traced(LARGE["windows"], jnp.bfloat16)
    assert taken == ["xla"]


def test_an_argument_or_another_default_decides(taken, monkeypatch):
    traced(LONG["causal"], implementation="xla")
    traced(LARGE["windows"], implementation="blocked")
    monkeypatch.setattr(attention, "_default", None)
    attention.set_default_implementation("xla")
    traced(LONG["group"])
    attention.set_default_implementation(None)
    traced(LONG["group"])
    assert taken == ["xla", "blocked", "xla", "blocked"]
    with pytest.raises(ValueError, match="attention 'flash': one of blocked, cudnn, xla"):
        attention.set_default_implementation("flash")


@pytest.mark.parametrize("name", ["causal", "masked", "masked, an empty image"])
def test_what_cudnn_is_asked_for(taken, name):
    """Causality and lengths alone (run by XLA here) give the definition: padding keys never reach a
    real row, and masked slots in the middle of an image are moved behind its length."""
    function, reference, arrays, _, rows = (LONG | CASES)[name]
    out = np.asarray(function(*map(jnp.asarray, arrays), implementation="cudnn"))
    assert taken == ["cudnn"]
    assert np.isfinite(out).all()
    expected = reference(*arrays)
    np.testing.assert_allclose(out[rows], expected[rows], rtol=TOLERANCE, atol=TOLERANCE)


def test_cudnn_leaves_real_rows_of_a_padded_prompt_right(taken):
    function, reference, arrays, _, _ = CASES["causal, ragged"]
    out = np.asarray(function(*map(jnp.asarray, arrays), implementation="cudnn"))
    expected = reference(*arrays)
    for p, length in enumerate(arrays[3]):
        np.testing.assert_allclose(
            out[p, :length], expected[p, :length], rtol=TOLERANCE, atol=TOLERANCE
        )
    assert np.isfinite(out).all() and taken == ["cudnn"]
