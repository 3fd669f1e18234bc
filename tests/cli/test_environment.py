from __future__ import annotations

import os

import pytest

from torch_eaas.cli.environment import child_environment, set_threads, torchrun_rank


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "3", "WORLD_SIZE": "4"}, 3),
        ({"RANK": "3"}, None),
    ],
    ids=["plain", "alone", "one of four", "no world"],
)
def test_rank_is_that_of_a_launch_of_several(environment: dict[str, str], rank: int | None) -> None:
    assert torchrun_rank(environment) == rank


def test_children_have_one_thread_that_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("SOMETHING", "else")
    environment = child_environment()
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["SOMETHING"] == "else"


def test_a_wait_policy_that_the_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    set_threads(2)
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
