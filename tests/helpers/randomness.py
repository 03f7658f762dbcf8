"""A plugin of pytest: all random numbers of a run come from one seed and the names of what draws them.

A test that is run again with that seed, alone or among others, draws the same.
"""

from __future__ import annotations

import os
import random
import secrets
import sys

import pytest

SEED = "OMNISTAGE_TEST_SEED"
os.environ.setdefault(SEED, str(secrets.randbits(32)))  # workers have it from the process that leads them


def reseed(*place: object) -> int:
    """32 bits that the seed of the run and a place make. Whatever draws without a seed of its own begins anew with that place, too."""
    source = random.Random(f"{os.environ[SEED]} {place}")
    # The same ones whatever is imported by now.
    given, of_random, of_numpy, of_torch = (source.getrandbits(32) for _ in range(4))
    random.seed(of_random)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(of_numpy)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(of_torch)
    return given


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> None:
    # One of a module is the same whichever test is the first that asks for it.
    place = request.node.nodeid if fixturedef.scope == "function" else fixturedef.baseid
    reseed(place, fixturedef.argname, getattr(request, "param_index", 0))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    reseed(item.nodeid)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A random number of 32 bits, made of the seed of the run and the name of the test. A failure shows that seed: with it in
    OMNISTAGE_TEST_SEED the test gets the same number again."""
    print(f"{SEED}={os.environ[SEED]}")
    return reseed(request.node.nodeid, "seed")
