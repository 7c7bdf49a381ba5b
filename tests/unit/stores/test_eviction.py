import gc
import hashlib
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.fingerprint import Fingerprint, model_key, store_key
from kitelib.stores.eviction import EvictionPolicy
from kitelib.upcycle.unit import Kind, UnitHead

MODEL = b"m" * 32


class HandClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def cf(name: object) -> Fingerprint:
    return Fingerprint(hashlib.sha256(str(name).encode()).digest())


def key_of(name: object, kind: Kind = "kv") -> str:
    return store_key(model_key(MODEL), kind, cf(name))


def head_of(name: object, parent: object, kind: Kind = "kv", *, tokens: int = 16, data_bytes: int = 1000) -> UnitHead:
    return UnitHead(kind, cf(name), cf(parent), MODEL, 0, 0.0, tokens, data_bytes + 200, data_bytes)


def drain(policy: EvictionPolicy) -> list[str]:
    order = []
    while (victim := policy.victim()) is not None:
        assert victim in policy
        policy.discard(victim)
        assert victim not in policy
        order.append(victim)
    assert len(policy) == 0
    return order


def add_chain(policy: EvictionPolicy, *names: object, parent: object = "root", num_bytes: int = 1000) -> list[str]:
    for name in names:
        policy.add(key_of(name), num_bytes, head=head_of(name, parent))
        parent = name
    return [key_of(name) for name in names]


def test_without_anything_to_learn_from_it_is_least_recently_used():
    policy = EvictionPolicy(HandClock())
    for key in "abcd":
        policy.add(key, 100)
    assert policy.victim() == "a"
    assert policy.victim() == "a"  # asking changes nothing
    policy.touch("a")
    policy.touch("nowhere")
    policy.discard("nowhere")
    assert drain(policy) == ["b", "c", "d", "a"]
    assert policy.victim() is None


def test_leaves_go_before_their_parents():
    policy = EvictionPolicy(HandClock())
    trunk = add_chain(policy, 0, 1, 2)
    left = add_chain(policy, "l3", "l4", parent=2)
    right = add_chain(policy, "r3", parent=2)
    for key in (*left, *right):
        policy.touch(key)  # the trunk is now the least recently used, and still needed
    assert drain(policy) == [left[1], left[0], right[0], *reversed(trunk)]


def test_a_child_may_come_before_its_parent():
    policy = EvictionPolicy(HandClock())
    names = [0, 1, 2, 3]
    for name in reversed(names):
        policy.add(key_of(name), 100, head=head_of(name, name - 1 if name else "root"))
    assert drain(policy) == [key_of(name) for name in reversed(names)]


def test_logits_and_tails_are_leaves_of_the_last_full_block():
    policy = EvictionPolicy(HandClock())
    policy.add(key_of("block"), 1000, head=head_of("block", "root"))
    policy.add(key_of("end", "logits"), 1000, head=head_of("end", "block", "logits"))
    policy.add(key_of("end"), 1000, head=head_of("end", "block", tokens=3))
    policy.touch(key_of("end"))
    assert drain(policy)[-1] == key_of("block")


def test_a_parent_that_left_and_came_back_is_a_parent_again():
    policy = EvictionPolicy(HandClock())
    trunk = add_chain(policy, 0, 1)
    policy.discard(trunk[0])
    assert trunk[0] not in policy
    policy.add("other", 100)
    add_chain(policy, 0)
    policy.touch(trunk[1])
    assert drain(policy) == ["other", trunk[1], trunk[0]]


def learn(policy: EvictionPolicy, clock: HandClock, gap_s: float) -> None:
    """Shows the policy values that come back after `gap_s`, and leaves nothing of them."""
    policy.add("shown", 100)
    clock.now += gap_s
    policy.touch("shown")
    policy.discard("shown")


def test_what_came_back_outlives_what_was_used_once_though_later():
    clock = HandClock()
    policy = EvictionPolicy(clock)
    learn(policy, clock, 100)
    policy.add("twice", 100)
    clock.now += 100
    policy.touch("twice")
    clock.now += 40
    policy.add("once", 100)
    assert policy.victim() == "once"
    clock.now += 100  # half the gap is what the second use is worth; then it is too old
    policy.add("new", 100)
    policy.discard("once")
    assert policy.victim() == "twice"


def test_uses_are_remembered_after_a_value_has_gone():
    clock = HandClock()
    policy = EvictionPolicy(clock)
    learn(policy, clock, 100)
    policy.add("back", 100)
    policy.discard("back")
    clock.now += 100
    policy.add("back", 100)
    clock.now += 10
    policy.add("new", 100)
    assert policy.victim() == "new"


def test_a_scan_does_not_wash_out_what_is_used_again():
    """A flood of values used once leaves those in place that came back."""
    clock = HandClock()
    policy = EvictionPolicy(clock)
    learn(policy, clock, 100)
    hot = [f"hot{index}" for index in range(10)]
    for _ in range(4):
        clock.now += 100
        for key in hot:
            policy.touch(key) if key in policy else policy.add(key, 100)
    for index in range(1000):
        policy.add(f"scan{index}", 100)
        clock.now += 0.01
        if len(policy) > 20:
            victim = policy.victim()
            assert victim is not None
            policy.discard(victim)
    assert all(key in policy for key in hot)


def test_what_is_dear_for_its_bytes_stays_longer():
    clock = HandClock()
    policy = EvictionPolicy(clock)
    learn(policy, clock, 100)
    add_chain(policy, *range(20))  # what is usual: 16 tokens in 1000 bytes
    drain(policy)
    policy.add(key_of("dense"), 250, head=head_of("dense", "r1"))
    clock.now += 10
    policy.add(key_of("usual"), 1000, head=head_of("usual", "r2"))
    clock.now += 10
    policy.add(key_of("bulky"), 4000, head=head_of("bulky", "r3"))
    assert drain(policy) == [key_of("bulky"), key_of("usual"), key_of("dense")]


def test_used_at_decides_the_order_of_what_is_found_after_a_restart():
    """B37: the order of use comes from the given times, not from the order in which files are listed."""
    clock = HandClock()
    policy = EvictionPolicy(clock)
    ages = {"c": 3.0, "a": 1.0, "d": 4.0, "b": 2.0}
    for key, used_at in ages.items():
        policy.add(key, 100, used_at=used_at)
    policy.touch("a", used_at=0.5)  # older than known: no step back
    assert drain(policy) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("used_at", [float("nan"), float("inf"), float("-inf"), 1e300])
def test_impossible_times_count_as_now(used_at):
    clock = HandClock()
    policy = EvictionPolicy(clock)
    policy.add("odd", 100, used_at=used_at)
    policy.touch("odd", used_at=used_at)
    clock.now += 1
    policy.add("new", 100)
    assert drain(policy) == ["odd", "new"]


def test_circles_and_long_chains_end():
    policy = EvictionPolicy(HandClock())
    for name, parent in ((1, 2), (2, 3), (3, 1), ("self", "self")):
        policy.add(key_of(name), 100, head=head_of(name, parent))
    assert policy.victim() == key_of("self")  # a unit that names itself is a leaf
    assert sorted(drain(policy)) == sorted(map(key_of, (1, 2, 3, "self")))
    count = 5000
    for name in range(count):
        policy.add(key_of(name), 100, head=head_of(name, name - 1))
    assert drain(policy) == [key_of(name) for name in reversed(range(count))]
    for name in range(0, 2000, 2):  # many small circles
        policy.add(key_of(name), 100, head=head_of(name, name + 1))
        policy.add(key_of(name + 1), 100, head=head_of(name + 1, name))
    assert len(set(drain(policy))) == 2000


NAMES = "abcdefg"
steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "touch", "discard", "evict", "replace"]),
        st.sampled_from(NAMES),
        st.sampled_from([*NAMES, "root"]),
        st.floats(0, 300),
    ),
    max_size=80,
)


@settings(deadline=None, max_examples=150)
@given(steps)
def test_behaves_like_a_slow_model(operations):
    """B9: whatever the order of events, no victim is gone already, and none has children while there is a leaf."""
    clock = HandClock()
    policy = EvictionPolicy(clock)
    model: dict[str, str] = {}  # key -> parent's key
    for operation, name, parent, wait in operations:
        key = key_of(name)
        clock.now += wait
        if operation == "add" or (operation == "replace" and key in model):
            policy.add(key, int(wait), head=head_of(name, parent))
            model[key] = key_of(parent) if parent != name else ""
        elif operation == "touch":
            policy.touch(key)
        elif operation == "discard":
            policy.discard(key)
            model.pop(key, None)
        elif operation == "evict":
            victim = policy.victim()
            assert (victim is None) == (not model)
            if victim is not None:
                parents = set(model.values())
                leaves = [one for one in model if one not in parents]
                assert victim in (leaves or model)
                policy.discard(victim)
                del model[victim]
        assert len(policy) == len(model)
        assert {one for one in map(key_of, NAMES) if one in policy} == set(model)
        assert len(policy._leaves) <= 2 * len(model) + 65
        assert len(policy._nodes) <= 2 * len(model)
    assert sorted(drain(policy)) == sorted(model)
    assert not policy._nodes


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 300)), max_size=60))
def test_the_lowest_score_goes(uses):
    """Against the formula, computed anew each time from the whole history."""
    clock = HandClock()
    policy = EvictionPolicy(clock)
    for name, wait in uses:
        clock.now += wait
        policy.touch(name) if name in policy else policy.add(name, 100)
    if uses:
        victim = policy.victim()
        assert victim is not None
        scores = {node.key: node.score for node in policy._nodes.values()}
        assert scores[victim] == min(scores.values())


def test_memory_stays_bounded_under_churn():
    """B26, B35: what the policy keeps per key is bounded, also for what has come and gone a hundred times over."""
    count = 2000
    policy = EvictionPolicy(HandClock())
    keys = [f"{index:0100}" for index in range(count)]
    gc.collect()
    tracemalloc.start()
    try:
        for key in keys:
            policy.add(key, 100)
        for index in range(10 * count):
            key = keys[index * 7919 % count]
            if index % 3:
                policy.touch(key)
            else:
                policy.discard(key)
                policy.add(key, 100)
            policy.victim()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 400 * count
