"""The benchmark of a build's parts measures what a build runs."""

import time

from benchmarks import build_parts


def test_all_parts_are_functions_of_the_tree():
    clock = build_parts.Clock()
    for part, names in build_parts._PARTS.items():
        for name in names:
            before = clock.measure(part, name)
            before()  # restores it


def test_a_moment_counts_as_the_innermost_part():
    clock = build_parts.Clock()

    def work(seconds):
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    def numbers():
        work(0.02)
        yield 1

    inner = clock.measured("inner", numbers)
    outer = clock.measured("outer", lambda: [work(0.01) for _ in inner()])
    outer()
    found = clock.summary()
    assert 0.02 <= found["inner"] < 0.03
    assert 0.01 <= found["outer"] < 0.02
