"""How long nothing needs to be looked for."""

import pytest

from torch_eaas.comm.quiet import DRIFT, QUIET_SHARE, Quiet

MS = 0.001


def test_it_is_quiet_for_a_share_of_the_shortest_wait_which_is_forgotten_slowly() -> None:
    quiet = Quiet(1.0)
    assert quiet.seconds == 0
    for waited in (10 * MS, 12 * MS, 13 * MS):
        quiet.add(waited)
    assert quiet.seconds == pytest.approx(0.8 * 10 * MS * 1.05**2)


def test_one_short_wait_ends_the_quiet_at_once() -> None:
    quiet = Quiet(1.0)
    for waited in (10 * MS, 0.0):
        quiet.add(waited)
    assert quiet.seconds < 2e-6


def test_it_is_never_quiet_for_longer_than_the_limit() -> None:
    quiet = Quiet(2 * MS)
    quiet.add(1.0)
    assert quiet.seconds == 2 * MS


def test_what_it_adds_to_a_wait_by_itself_does_not_make_it_grow() -> None:
    # whoever sleeps through the quiet measures at least that
    assert QUIET_SHARE * DRIFT < 1
