"""The clients of examples/ in other languages do what the Python client does. Node's runs everywhere; the others take minutes to build."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.ports import take_address
from omnistage.client import Omni
from tools.examples import LANGUAGES, Example, build, check_answer, check_full_and_cancelled, check_unknown, get_expected, slow_pipeline

MAKES_MINUTES = [pytest.mark.long, pytest.mark.timeout(900)]
"""A compiler of C++, beside other tests."""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[] if name == "node" else MAKES_MINUTES) for name in LANGUAGES])
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    """It is built, in a folder of its own."""
    language = LANGUAGES[request.param]
    if missing := language.missing():
        pytest.skip(f"not on this machine: {', '.join(missing)}; `make examples` says what to install")
    return Example(build(language), tmp_path_factory.mktemp(language.name))


@pytest.fixture(scope="module")
def full_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a router with one place, whose answers take half an hour."""
    with Omni(pipeline=str(slow_pipeline(tmp_path_factory.mktemp("slow"))), max_sessions=1) as omni:
        yield omni.address


def test_it_gets_the_text_and_the_samples_of_the_python_client(example: Example, toy_address: str) -> None:
    check_answer(example, toy_address, get_expected(toy_address))


def test_it_tells_what_is_wrong_with_a_request(example: Example, toy_address: str) -> None:
    check_unknown(example, toy_address)


def test_it_tells_when_to_ask_again_and_ctrl_c_cancels(example: Example, full_address: str) -> None:
    assert float(check_full_and_cancelled(example, full_address)) > 0


def test_it_tells_that_nobody_is_there(example: Example) -> None:
    status, out, err = example.run(take_address())
    assert (status, out.strip()) == (1, "")
    assert err.strip().startswith("error: ")
