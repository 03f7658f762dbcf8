"""Servers of a stack on one device are told what part of its memory each of them may count on."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from omnistage.cli.stack.layout import Layout, PipelineLayout, StageLayout
from omnistage.cli.stack.pipelines import share_devices
from omnistage.client.errors import StackError
from omnistage.host.settings import read_settings
from omnistage.models import registry
from omnistage.models.family import Family, ModelEntry
from omnistage.models.options import LoadOptions
from omnistage.stage.settings import StageSettings

TAKER = ModelEntry("nowhere:Model", devices=("cpu", "cuda"), uses=("memory_share",))


@pytest.fixture(autouse=True)
def _takers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose Thinker and Talker take what they find free, and whose Code2Wav does not."""
    models = {"thinker": TAKER, "talker": TAKER, "code2wav": ModelEntry("nowhere:Model", devices=("cpu", "cuda"))}
    monkeypatch.setitem(registry.FAMILIES, "takers", Family(models))


def one(*stages: StageLayout) -> Layout:
    return Layout([PipelineLayout("takers", "takers", stages)])


def shares(*stages: StageLayout) -> dict[str, float]:
    """The share that a server of each stage reads from its command line."""
    layout = share_devices(one(*stages))
    told = layout.pipelines[0].stages
    options = {stage.kind: LoadOptions.of(read_settings(StageSettings, layout.stage_arguments(stage, ["a:1"]), "stage")) for stage in told}
    return {kind: each.memory_share for kind, each in options.items()}


def stage(kind: str, device: str = "cpu", replicas: int = 1, settings: Mapping[str, str] | None = None) -> StageLayout:
    return StageLayout(kind, "takers", device=device, replicas=replicas, settings=settings or {})


def given(part: float) -> dict[str, str]:
    return {"memory_share": str(part)}


TOO_MUCH = "--memory-share: 1 of the memory of cuda is given away, and 2 more are on it; all share 1: give less"


def test_one_that_is_alone_on_its_device_has_all_of_it() -> None:
    assert shares(stage("thinker"), stage("talker", "cuda"), stage("code2wav")) == {"thinker": 1, "talker": 1, "code2wav": 1}
    assert shares(stage("thinker", "cuda:1"), stage("talker", "cuda:0")) == {"thinker": 1, "talker": 1}


def test_replicas_and_stages_on_one_device_have_equal_parts() -> None:
    assert shares(stage("thinker", replicas=2)) == {"thinker": 0.5}
    on_cuda = (stage("thinker", "cuda"), stage("talker", "cuda:0"), stage("code2wav", "cuda:0"))
    assert shares(*on_cuda) == {"thinker": 0.5, "talker": 0.5, "code2wav": 1}
    assert shares(stage("thinker", "cuda:0", 2), stage("talker", "cuda:0")) == {"thinker": 0.333, "talker": 0.333}


def test_what_somebody_gives_stays_and_the_others_have_the_rest() -> None:
    assert shares(stage("thinker", settings=given(0.6)), stage("talker", replicas=2)) == {"thinker": 0.6, "talker": 0.2}
    assert shares(stage("thinker", settings=given(0.25))) == {"thinker": 0.25}
    assert shares(stage("thinker", replicas=2, settings=given(0.5))) == {"thinker": 0.5}


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ([stage("thinker", replicas=2, settings=given(0.6))], "--memory-share: 1.2 of the memory of cpu is given away; all share 1"),
        ([stage("thinker", "cuda:0", settings=given(1)), stage("talker", "cuda:0", 2)], TOO_MUCH),
    ],
)
def test_more_than_there_is_cannot_be_given(stages: list[StageLayout], told: str) -> None:
    with pytest.raises(StackError, match=re.escape(told)):
        share_devices(one(*stages))


def test_all_pipelines_of_a_stack_share_a_device_and_a_stage_of_two_counts_once() -> None:
    """Those that start later, too: what is theirs is left for them."""
    thinker, own = stage("thinker"), stage("thinker", settings={"threads": "2"})
    stages = {"spoken": [thinker, stage("talker", replicas=2)], "written": [thinker], "other": [own]}
    layout = share_devices(Layout([PipelineLayout(name, name, kinds) for name, kinds in stages.items()]))
    parts = [[each.settings["memory_share"] for each in pipeline.stages] for pipeline in layout.pipelines]
    assert parts == [["0.25", "0.25"], ["0.25"], ["0.25"]]
    assert [group.pipelines for group in layout.groups] == [("spoken", "written"), ("spoken",), ("other",)]
