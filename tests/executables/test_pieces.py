"""A program in pieces gives what the whole gives, compiles what is alike once, and leaves donated arrays in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from ferrum_jax.runtime.compile.executable_store import load_executable, serialize
from ferrum_jax.runtime.compile.lowered import Lowered
from ferrum_jax.runtime.compile.pieces import PiecedExecutable, lower_pieces

SIZE = 8
TABLE = np.arange(SIZE, dtype=np.float32)[None]  # what is closed over


def layer(kind: str, weight: jax.Array, pool: jax.Array, x: jax.Array, scale: float | jax.Array):
    y = x @ weight * scale
    return (jnp.tanh(y) if kind == "a" else y), pool.at[0].add(y[0])


_layer = jax.jit(layer, static_argnums=0)


def program(weights, pools, hidden, x):
    """Two kinds of layers, one kind called three times; something between two calls; a result that skips the last."""
    x = x * TABLE + 1
    early = x.sum()
    found = []
    for i, (weight, pool) in enumerate(zip(weights, pools, strict=True)):
        x, pool = _layer("b" if i == 2 else "a", weight, pool, x, 2.0)
        x = x + early if i == 1 else x
        found.append(pool)
    return found, hidden.at[:2].set(x), early


def arguments():
    draw = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(draw.standard_normal(shape, np.float32))

    weights, pools = [array(SIZE, SIZE) for _ in range(4)], [array(16, SIZE) for _ in range(4)]
    return weights, pools, array(4, SIZE), array(2, SIZE)


def pieces_of(function, given, donated=(1, 2), together=1) -> PiecedExecutable:
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    traced = jax.jit(function, donate_argnums=donated).trace(*structs)
    lowered = lower_pieces(
        traced,
        "layer",
        together,
        lambda piece: Lowered(piece.lower()),
        sharding=SingleDeviceSharding(jax.devices()[0]),
        compiler_options=None,
    )
    assert lowered.text()
    return lowered.compile()


def test_pieces_give_what_the_whole_gives_and_take_the_memory_of_what_is_donated():
    expected = jax.jit(program)(*arguments())
    made = pieces_of(program, arguments())
    loaded = load_executable(serialize(made), jax.devices()[:1])
    for executable in (made, loaded):
        weights, pools, hidden, x = arguments()
        where = [array.unsafe_buffer_pointer() for array in (*pools, hidden)]
        found = executable(weights, pools, hidden, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
        assert [array.unsafe_buffer_pointer() for array in (*found[0], found[1])] == where
        assert all(array.is_deleted() for array in (*pools, hidden)) and not x.is_deleted()


def test_calls_that_are_alike_are_one_piece():
    made = pieces_of(program, arguments())
    ran = [step.piece for step in made.plan.steps]
    assert len(made.pieces) == 5, "what is before, two kinds, what is between and after"
    first, second, between, third, fourth = ran[1], ran[2], ran[3], ran[4], ran[5]
    assert first == second == fourth and len({first, between, third, ran[0], ran[6]}) == 5


def test_what_a_later_piece_reads_is_not_given_away():
    def twice_read(weights, pools, hidden, x):
        before = x * TABLE
        x, pool = _layer("a", weights[0], pools[0], before, 2.0)
        return [pool, *pools[1:]], hidden.at[:2].set(x + before)

    expected = jax.jit(twice_read)(*arguments())
    found = pieces_of(twice_read, arguments())(*arguments())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_neighbouring_calls_are_one_piece():
    def four(weights, pools, hidden, x):
        x, found = x * TABLE, []
        for weight, pool in zip(weights, pools, strict=True):
            x, pool = _layer("a", weight, pool, x, 2.0)
            found.append(pool)
        return found, hidden.at[:2].set(x)

    expected = jax.jit(four)(*arguments())
    made = pieces_of(four, arguments(), together=2)
    assert [step.piece for step in made.plan.steps] == [0, 1, 1, 2]
    given = arguments()
    where = [array.unsafe_buffer_pointer() for array in given[1]]
    found = made(*given)
    assert [array.unsafe_buffer_pointer() for array in found[0]] == where
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
    together = pieces_of(program, arguments(), together=2).plan.steps
    assert len(together) == 5, "what stands between two calls parts them"


def test_what_a_call_closes_over_or_is_given_as_a_number_is_part_of_its_piece():
    def doubled(weights, pools, hidden, x):
        x = x * TABLE
        x, pool = _layer("a", weights[0], pools[0], x, 2.0)
        x, other = _layer("a", weights[1], pools[1], x, 3.0)
        return [pool, other, pools[2], pools[3]], hidden.at[:2].set(x), TABLE

    expected = jax.jit(doubled)(*arguments())
    made = pieces_of(doubled, arguments())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), made(*arguments()), expected)


def test_a_program_that_calls_nothing_is_not_cut():
    with pytest.raises(AssertionError, match="does not call layer"):
        pieces_of(lambda weights, pools, hidden, x: hidden + 1, arguments(), donated=(2,))


def test_arguments_of_another_form_are_refused():
    weights, pools, hidden, x = arguments()
    with pytest.raises(AssertionError, match="the program takes"):
        pieces_of(program, arguments())(weights[:3], pools, hidden, x)
