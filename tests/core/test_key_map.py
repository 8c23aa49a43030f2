"""The compact maps answer like the `OrderedDict` and the `dict` they stand for."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache._native import KeyIndex, KeyMap

KEYS = st.integers(0, 40).map(lambda i: bytes([i % 3]) * 8 + i.to_bytes(8, "big"))
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.none() | st.integers(0, 9)),
    st.tuples(st.sampled_from(["del", "pop", "get", "getitem", "in"]), KEYS),
    st.tuples(st.just("pop or"), KEYS, st.just("else")),
    st.tuples(st.just("end"), KEYS, st.booleans()),
    st.tuples(st.just("popitem"), st.booleans()),
    st.tuples(st.just("clear")),
)


def apply(m, step):
    """The outcome of one step, a KeyError included."""
    try:
        match step:
            case "set", key, value:
                m[key] = value
            case "del", key:
                del m[key]
            case "pop", key:
                return m.pop(key)
            case "pop or", key, otherwise:
                return m.pop(key, otherwise)
            case "get", key:
                return m.get(key), m.get(key, 7)
            case "getitem", key:
                return m[key]
            case "in", key:
                return key in m
            case "end", key, last:
                m.move_to_end(key, last)
            case "popitem", last:
                return m.popitem(last)
            case _:
                m.clear()
    except KeyError:
        return KeyError
    return None


@settings(max_examples=400, deadline=None)
@given(st.lists(STEPS, max_size=120))
def test_it_is_an_ordered_dict(steps):
    ours, twin = KeyMap(), OrderedDict()
    for step in steps:
        assert apply(ours, step) == apply(twin, step)
        assert len(ours) == len(twin)
        assert list(ours) == list(ours.keys()) == list(twin)
        assert list(reversed(ours)) == list(reversed(twin))
        assert list(ours.values()) == list(twin.values())
        assert list(ours.items()) == list(twin.items())


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS.filter(lambda step: step[0] not in ("end", "popitem")), max_size=120))
def test_the_one_without_an_order_is_a_dict(steps):
    ours, twin = KeyIndex(), {}
    for step in steps:
        assert apply(ours, step) == apply(twin, step)
        assert len(ours) == len(twin)
        assert all(ours[key] == value for key, value in twin.items())


def test_thousands_of_keys_are_found_while_it_grows():
    keys = [i.to_bytes(16, "little") for i in range(5000)]
    m = KeyMap()
    for i, key in enumerate(keys):
        m[key] = i
    assert [m[key] for key in keys] == list(range(5000))
    for key in keys[::2]:
        del m[key]
    assert list(m.items()) == [(key, i) for i, key in enumerate(keys) if i % 2]


@pytest.mark.parametrize("kind", [KeyMap, KeyIndex])
@pytest.mark.parametrize("key", [b"", b"x" * 15, b"x" * 17, "x" * 16, 3, None, bytearray(16)])
def test_what_is_no_key_is_not_in_it_and_does_not_come_in(kind, key):
    m = kind()
    m[b"x" * 16] = 1
    assert key not in m and m.get(key, 2) == 2 and m.pop(key, 3) == 3
    with pytest.raises(KeyError):
        m[key]
    with pytest.raises(ValueError):
        m[key] = 1
    assert len(m) == 1


def test_an_iteration_over_a_changed_map_says_so():
    m = KeyMap()
    for i in range(3):
        m[bytes([i]) * 16] = i
    walk = iter(m.values())
    next(walk)
    m[bytes([0]) * 16] = "another value is no change"
    next(walk)
    m.move_to_end(bytes([0]) * 16)
    with pytest.raises(RuntimeError, match="changed during an iteration"):
        next(walk)


def test_an_iteration_that_has_ended_stays_so_and_keeps_its_map():
    walk = iter(KeyMap())
    gc.collect()
    assert list(walk) == [] and list(walk) == []


class Thing:
    pass


@pytest.mark.parametrize("kind", [KeyMap, KeyIndex])
def test_values_live_as_long_as_they_are_in_it_and_no_longer(kind):
    m, thing = kind(), Thing()
    gone = weakref.ref(thing)
    m[bytes(16)] = thing
    del thing
    gc.collect()
    assert gone() is not None
    m[bytes(16)] = None
    assert gone() is None


@pytest.mark.parametrize("kind", [KeyMap, KeyIndex])
def test_a_cycle_through_it_is_collected(kind):
    m, thing = kind(), Thing()
    thing.map, gone = m, weakref.ref(thing)
    m[bytes(16)] = thing
    del m, thing
    gc.collect()
    assert gone() is None


def test_a_finalizer_may_use_the_map_that_drops_it():
    m = KeyMap()

    class Restless:
        def __del__(self) -> None:
            m[bytes([9]) * 16] = "late"

    m[bytes(16)] = Restless()
    m[bytes(16)] = None
    m[bytes([1]) * 16] = Restless()
    del m[bytes([1]) * 16]
    assert list(m.values()) == [None, "late"]
