from __future__ import annotations

from pdd_runtime.plugins.sampling import uniform


def test_the_number_depends_on_seed_and_position_only() -> None:
    numbers = {(seed, position): uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(set(numbers.values())) == len(numbers)
    assert all(uniform(seed, position) == number for (seed, position), number in reversed(numbers.items()))


def test_the_numbers_of_one_seed_and_of_one_position_are_spread_evenly() -> None:
    for numbers in ([uniform(7, i) for i in range(10_000)], [uniform(i, 7) for i in range(10_000)]):
        assert all(0 <= number < 1 for number in numbers)
        tenths = [sum(i / 10 <= number < (i + 1) / 10 for number in numbers) for i in range(10)]
        assert all(850 < count < 1150 for count in tenths)  # five standard deviations


def test_any_integer_is_a_seed() -> None:
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)
    assert uniform(2**64 + 5, 3) == uniform(5, 3)


def test_the_number_never_changes_between_versions() -> None:
    """It crosses workers: one that draws by another rule would answer otherwise."""
    assert uniform(1234567, 89) == 0.4981141726310214
