"""Random keys and host generators: equal in every process, place and device count."""

import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evisrag_jax.runtime import prng
from evisrag_jax.runtime.host_random import philox, text_hash

DATA = jax.random.key_data


def test_token_key_is_the_documented_fold():
    key = jax.random.key(7)
    for number in (3, zlib.crc32(b"q-12"), 5):
        key = jax.random.fold_in(key, number)
    assert (DATA(prng.token_key(7, 3, "q-12", 5)) == DATA(key)).all()
    token = jax.random.fold_in(key, 9)
    assert (DATA(prng.fold_tokens(prng.token_key(7, 3, "q-12", 5), 9)) == DATA(token)).all()


def test_keys_do_not_depend_on_the_place_in_the_batch():
    names = ["a", "b", "ü-3"]
    grid = DATA(prng.sample_keys(1, 2, names, 4))
    assert grid.shape[:2] == (3, 4)
    for p, name in enumerate(names):
        for g in range(4):
            assert (grid[p, g] == DATA(prng.token_key(1, 2, name, g))).all()
    assert (DATA(prng.sample_keys(1, 2, names[::-1], 4))[::-1] == grid).all()
    assert (DATA(prng.sample_keys(1, 2, names, 2, first_sample=2)) == grid[:, 2:]).all()


def test_keys_differ_in_every_part():
    base = ("x", 0, 0, 0)
    others = [("y", 0, 0, 0), ("x", 1, 0, 0), ("x", 0, 1, 0), ("x", 0, 0, 1)]
    keys = {
        tuple(np.asarray(DATA(prng.token_key(seed, step, name, sample))).tolist())
        for name, seed, step, sample in [base, *others]
    }
    assert len(keys) == 5


def test_fold_tokens_under_jit_with_an_index_a_key():
    keys = prng.sample_keys(0, 0, ["a", "b"], 3)
    index = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    folded = jax.jit(prng.fold_tokens)(keys, index)
    for p in range(2):
        for g in range(3):
            assert (
                DATA(folded[p, g]) == DATA(jax.random.fold_in(keys[p, g], int(index[p, g])))
            ).all()


def test_draws_do_not_depend_on_sharding():
    """Partitionable threefry: a draw over 8 devices equals the draw on one, bitwise."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))

    def draw(key):
        return jax.random.uniform(key, (64, 5))

    key = prng.root_key(4)
    assert (jax.jit(draw, out_shardings=sharded)(key) == jax.jit(draw)(key)).all()


def test_keys_work_under_a_transfer_guard():
    with jax.transfer_guard("disallow"):
        prng.token_key(1, 2, "a", 3)
        prng.sample_keys(1, 2, ["a"], 3)


def test_bad_numbers_are_refused():
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match="seed"):
            prng.token_key(seed, 0, "a", 0)
        with pytest.raises(ValueError, match="seed"):
            philox(seed)
    with pytest.raises(ValueError, match="step -1"):
        prng.token_key(0, -1, "a", 0)
    with pytest.raises(ValueError, match="group 0"):
        prng.sample_keys(0, 0, ["a"], 0)
    with pytest.raises(ValueError, match="negative"):
        philox(0, -3)


def test_philox_depends_on_the_tuple_alone():
    def draw(*parts):
        return philox(*parts).integers(0, 2**63, 4).tolist()

    assert draw(1, "shuffle", 2) == draw(1, "shuffle", 2)
    streams = [(1,), (1, 0), (1, 0, 0), (1, "shuffle"), (1, 2**32), (1, 0, 1), (0, 1), (2,)]
    assert len({tuple(draw(*parts)) for parts in streams}) == len(streams)
    assert isinstance(philox(1).bit_generator, np.random.Philox)


def test_names_hash_equally_in_another_process_without_jax():
    code = (
        "import sys; from evisrag_jax.runtime.host_random import philox, text_hash;"
        "print(text_hash('frage-ü'), philox(3, 'a', 5).integers(0, 10**9));"
        "assert 'jax' not in sys.modules"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == [
        str(text_hash("frage-ü")),
        str(philox(3, "a", 5).integers(0, 10**9)),
    ]
