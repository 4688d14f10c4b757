"""Collectives read from compiled programs: exact bytes of hand-made ones, formulas of the real update."""

from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from plan.check import small
from plan.hlo import Collective, collectives, moved
from plan.traffic import VOCAB, bytes_of, cost, evaluated, kernels, update_traffic

from evisrag_jax.runtime.mesh import make_mesh

ROOT = Path(__file__).parents[2]


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_collectives_of_a_loop_count_for_every_turn():
    """A scan of seven turns that gathers a [8, 16] float32 weight of eight parts and adds up one number."""
    mesh = make_mesh(1, 8, 1)
    split, whole = (NamedSharding(mesh, PartitionSpec(*p)) for p in (("fsdp",), ()))

    def loop(weights, rows):
        def turn(total, w):
            w = jax.lax.with_sharding_constraint(w, whole)
            out = jax.lax.with_sharding_constraint(rows @ w, split)
            return total + jnp.sum(jnp.sin(out)), None

        return jax.lax.scan(turn, 0.0, weights)[0]

    stack = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    weights = jax.ShapeDtypeStruct((7, 8, 16), jnp.float32, sharding=stack)
    rows = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=split)
    found = collectives(compiled(loop, weights, rows))
    assert found[Collective("all-gather", 8 * 16 * 4, 8)] == 7
    sums = {one: n for one, n in found.items() if one.kind == "all-reduce"}
    assert sum(one.nbytes * n for one, n in sums.items()) in (
        4,
        4 * 7,
    )  # once, if taken out of the loop
    assert set(found) <= {*sums, Collective("all-gather", 512, 8)}


def test_every_way_of_writing_groups_is_read():
    text = """
%body (p: s32[]) -> s32[] {
  %a = bf16[4,2]{1,0} all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
  %b = (f32[3]{0}, f32[5]{0}) all-reduce(%x, %y), replica_groups=[2,4]<=[8], to_apply=%add
}

ENTRY %main (p: s32[]) -> s32[] {
  %w = s32[] while(%p), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %c = f32[6]{0} reduce-scatter(%x), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}
  %d = f32[2]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  %e = (f32[1]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[1,8]<=[8], dimensions={0}
}
"""
    assert collectives(text) == Counter(
        {
            Collective("all-gather", 16, 2): 3,
            Collective("all-reduce", 32, 4): 3,
            Collective("reduce-scatter", 24, 4): 1,
            Collective("collective-permute", 8, 2): 1,
            Collective("all-gather", 32, 8): 1,
        }
    )
    with pytest.raises(ValueError, match="does not say how often"):
        collectives(text.replace("known_trip_count", "unknown"))


def test_bytes_that_a_device_sends():
    assert moved(Collective("all-gather", 800, 8)) == 700
    assert moved(Collective("all-reduce", 800, 8)) == 1400
    assert moved(Collective("collective-permute", 8, 2)) == 8


@pytest.mark.slow
def test_the_update_moves_what_the_formulas_say():
    """fsdp=8: kernels are gathered four times a slice and tables three times; gradients of kernels are added
    up twice, of tables three times; nothing as large as an activation moves (1 %)."""
    found = update_traffic(4, 128, (1, 8, 1))
    W, E = 4 * kernels(small(layers=4, width=128, vocab=VOCAB)), 4 * VOCAB * 128
    assert bytes_of(found, "all-gather", 8) == pytest.approx(4 * W + 3 * E, rel=0.01)
    assert bytes_of(found, "all-reduce", 8) == pytest.approx(2 * W + 3 * E, rel=0.01)
    assert {one.kind for one in found} == {"all-gather", "all-reduce"}


def test_the_committed_tables_and_their_direction():
    """docs/scaling.md holds what the tool prints; more machines move more, never less."""
    assert evaluated() in (ROOT / "docs/scaling.md").read_text()
    one, many = (cost("7b", data, 8, 1, scatter=True) for data in (1, 64))
    assert one.between == 0 < many.between and one.compute == many.compute
    assert cost("7b", 8, 8, 1, scatter=False).inside > cost("7b", 8, 8, 1, scatter=True).inside
