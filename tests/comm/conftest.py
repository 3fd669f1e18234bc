from __future__ import annotations

import pytest

from tests.certificates import make_certificate
from torch_eaas.access import Access

pytest.register_assert_rewrite(
    "tests.comm.fake_cuda", "tests.comm.transport_contract", "tests.comm.unix_contract"
)

TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Access:
    """What a server is given."""
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"), "server")
    return Access(token=TOKEN, tls_certificate=certificate, tls_key=key)


@pytest.fixture(scope="module")
def trusting(certified: Access) -> Access:
    """What its clients are given."""
    return Access(token=TOKEN, tls_authority=certified.tls_certificate)
